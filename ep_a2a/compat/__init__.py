"""What other libraries would ask for, computed without them."""
