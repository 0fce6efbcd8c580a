"""Other libraries' interfaces on our kernels, and what these libraries would ask for, computed without them."""
