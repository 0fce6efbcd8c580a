"""Managers: one all-to-all backend each, chosen by name through the registry."""
