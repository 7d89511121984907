"""Which scripts are there, in which versions, what does a node get of them, and how do people see what they came to?"""
