"""ATOM and AITER: EP_A2A_BACKEND names the backend of ATOM's mixture-of-experts layers. docs/atom.md says how.

Nothing of ATOM or AITER is imported before they import it themselves.
"""

from ep_a2a.integrations.atom.switch import activate, register

__all__ = ["activate", "register"]
