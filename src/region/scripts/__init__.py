"""What may be run on a node, which of it is chosen for a run, what a node is handed, and what came back."""
