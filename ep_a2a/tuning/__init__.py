"""Launch numbers: the policy that computes them, and the tuned tables that replace them."""
