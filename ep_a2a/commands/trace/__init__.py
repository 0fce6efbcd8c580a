"""`ep-a2a trace`: steps with recorded spans, and their picture."""
