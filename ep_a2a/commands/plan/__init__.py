"""`ep-a2a plan`: what an op's buffers take on each GPU, and what an exchange between nodes would take."""
