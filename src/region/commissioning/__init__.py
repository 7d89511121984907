"""What a node signalled is stored first; then what follows from it is done, step by step."""
