"""vLLM's plugin: `--all2all-backend ep_a2a` on an unpatched vLLM.

vLLM calls `register` through the entry point group `vllm.general_plugins` in each of its processes. `register` adds the
backend's name. All other patches are applied only in processes whose configuration names the backend.
tests/engines/vllm/contract/patches.toml lists the patches,
docs/vllm.md the modules from the flag to `op.dispatch`.
"""

from ep_a2a.integrations.vllm.plugin import register

__all__ = ["register"]
