"""The shape of a package, not the package: see shape/README.md."""
