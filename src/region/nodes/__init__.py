"""What is a node, which statuses does it have, and what alone may change them?"""
