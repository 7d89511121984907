"""The HTTP service that machines talk to while they are commissioned or deployed."""
