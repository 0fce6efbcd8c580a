"""`ep-a2a plan`: the memory of an op on each GPU."""
