"""What a rack knows of operating systems: what their releases are called, what their images are good for, and which
need a license key. It decides nothing else: what is held is held, whether a driver has heard of it or not."""
