"""The rack daemon: keeps a verified copy of the region's images and says what can be deployed here now."""
