"""Other libraries' interfaces on this package's kernels, and what they would ask for, computed without them."""
