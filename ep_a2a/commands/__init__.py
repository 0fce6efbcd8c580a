"""Implements the commands of `ep-a2a`. Only `ep_a2a.cli` imports this package."""
