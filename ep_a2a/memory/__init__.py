"""Symmetric memory: the same bytes on every rank, each rank's base address known to all."""
