"""Managers and ops on other projects' libraries. One module imports each library, when a manager is made."""
