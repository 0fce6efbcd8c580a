"""vLLM's plugin: `--all2all-backend ep_a2a` on an unpatched vLLM.

vLLM loads `register` through the entry point group `vllm.general_plugins` in each of its processes. It teaches vLLM the
name and does nothing else: all other patches (see `ledger`) are applied by the processes of a user who chose it.
"""

from ep_a2a.integrations.vllm.plugin import register

__all__ = ["register"]
