"""How are a node's disks and interfaces to be used, unless people say otherwise? Decided when it was commissioned."""
