"""The SGLang integration: `--moe-a2a-backend ep_a2a`, and `deepep` where DeepEP is not installed. See docs/sglang.md.

`register` is the entry point in SGLang's group of plugins. Importing this package imports nothing of SGLang.
"""

from ep_a2a.integrations.sglang.plugin import register

__all__ = ["register"]
