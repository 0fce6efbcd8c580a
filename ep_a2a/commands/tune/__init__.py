"""`ep-a2a tune`: a search for the launch numbers that make round trips fastest."""
