"""What do the outputs of the built-in scripts say about a node's hardware?"""
