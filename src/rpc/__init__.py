"""What the region and the rack share: the wire, the values that travel on it, and how bytes are fetched and kept."""
