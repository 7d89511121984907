"""The script runner that runs on a node: standard library only, imports nothing of region, rack or rpc."""
