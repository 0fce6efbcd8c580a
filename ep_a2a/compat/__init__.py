"""Other libraries' interfaces on our ops, and what they would ask for, without them."""
