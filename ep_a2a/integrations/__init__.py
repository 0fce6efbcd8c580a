"""What connects this package to inference engines; each engine's differences lie in a folder of its own."""
