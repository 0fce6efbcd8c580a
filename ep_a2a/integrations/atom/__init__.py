"""The ATOM integration: EP_A2A_BACKEND names the backend of ATOM's mixture-of-experts layers. See docs/atom.md.

It imports nothing of ATOM or AITER before they import it themselves.
"""

from ep_a2a.integrations.atom.activation import activate, register

__all__ = ["activate", "register"]
