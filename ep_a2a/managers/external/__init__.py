"""Managers and ops on other projects' libraries; each library is imported by one module, when it is needed."""
