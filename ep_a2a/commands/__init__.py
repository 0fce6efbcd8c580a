"""What the commands of `ep-a2a` do. Nothing but `ep_a2a.cli` imports this package."""
