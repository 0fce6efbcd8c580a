"""Everything of ATOM and AITER that this integration uses. tests/signatures holds the signatures."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class AtomModules:
    """The modules and functions of ATOM and AITER that are used here.

    Attributes:
        modular_kernel: atom.model_ops.fused_moe.modular_kernel.
        envs: atom.utils.envs, whose attributes are ATOM's environment variables.
        get_config: the configuration of the running engine, or None.
        get_ep_group: AITER's expert-parallel group.
        tbo_enabled: whether this engine overlaps the two halves of a batch (TBO).
        tbo_active: whether the calling thread runs one of these halves. tbo_current_ubatch_id: which one.
    """

    modular_kernel: Any
    envs: Any
    get_config: Callable[[], Any]
    get_ep_group: Callable[[], Any]
    tbo_enabled: Callable[[], bool]
    tbo_active: Callable[[], bool]
    tbo_current_ubatch_id: Callable[[], int]

    @classmethod
    def imported(cls) -> AtomModules:
        """Imports them from the packages of this environment."""
        ubatching = importlib.import_module("atom.utils.tbo.ubatching")
        return cls(
            modular_kernel=importlib.import_module("atom.model_ops.fused_moe.modular_kernel"),
            envs=importlib.import_module("atom.utils.envs"),
            get_config=importlib.import_module("atom.config").get_current_atom_config,
            get_ep_group=importlib.import_module("aiter.dist.parallel_state").get_ep_group,
            tbo_enabled=ubatching.tbo_enabled,
            tbo_active=ubatching.tbo_active,
            tbo_current_ubatch_id=ubatching.tbo_current_ubatch_id,
        )
