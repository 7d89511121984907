"""Which nodes have which tags, and how are definitions evaluated?"""
