"""A whole region with its racks in one process, where nothing happens but what a test lets happen.

The parts are the real ones, over a real PostgreSQL and real files. Only what carries from one to the next is held in
lanes (:mod:`tests.world.turns`): the work of threads, the results of statements, notifications, what is on the wire of
links and of HTTP. A test, or hypothesis, says which lane moves next, so every interleaving can be tried, and repeated.
"""
