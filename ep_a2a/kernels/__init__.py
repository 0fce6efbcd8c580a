"""Device code and the op that launches it. Importing this package loads nothing; `kernels.op` is the way in."""
