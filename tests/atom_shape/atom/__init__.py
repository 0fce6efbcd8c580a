"""The shape of a package, not the package: see tests/atom_shape/README.md."""
