"""Integrations into inference engines, a folder for each engine."""
