"""The region daemon: keeps the truth of what should be deployable, and answers API clients."""
