"""Device code: kernels, the primitives they share, and the host code that compiles and launches them."""
