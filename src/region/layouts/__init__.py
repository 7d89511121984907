"""Which storage and network configuration does a node get by default?"""
