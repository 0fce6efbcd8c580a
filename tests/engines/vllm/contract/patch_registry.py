"""The registry of patches: every place where ep_a2a.integrations.vllm changes vLLM, why, and until when.

tests/integration/test_vllm_contract.py fails when a target moves. docs/vllm.md shows this table.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Patch:
    """One change of vLLM.

    Attributes:
        name: its name in the docstring of the function that applies it.
        target: the attribute that is replaced, "module:attribute".
        applied: in which processes, and when.
        what: the change.
        why: what happens without it.
        remove_when: the upstream change that makes it unnecessary.
    """

    name: str
    target: str
    applied: str
    what: str
    why: str
    remove_when: str


PATCHES = tuple(
    Patch(name, **fields)
    for name, fields in tomllib.loads(Path(__file__).with_name("patches.toml").read_text()).items()
)
