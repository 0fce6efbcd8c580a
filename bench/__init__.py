"""Benchmarks that need engines of other projects, and the results of all benchmarks."""
