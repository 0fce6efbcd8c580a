"""Other libraries' interfaces on this package's kernels, and DeepEP's buffer sizes, computed without DeepEP.

`install` gives these modules the libraries' import names.
"""

from ep_a2a.compat.installation import install, uninstall

__all__ = ["install", "uninstall"]
