"""`ep-a2a plan`: the memory of an op on each GPU, and the predicted time of an exchange between nodes."""
