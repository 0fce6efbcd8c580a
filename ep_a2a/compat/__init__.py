"""Other libraries' interfaces on this package's kernels, and DeepEP's buffer sizes, computed without DeepEP."""
