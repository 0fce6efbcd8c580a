"""Lists contenders by name. Their modules, and the libraries behind them, load at their first use."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from ep_a2a.errors import UnknownNameError

if TYPE_CHECKING:
    from ep_a2a.commands.bench.contender import Contender

LIMIT = "wire_limit"
NATIVE = "ep_a2a"

logger = logging.getLogger(__name__)

CONTENDERS = {
    LIMIT: ("wire_limit", "WireLimitContender"),
    NATIVE: ("native", "OpContender"),
    "ep_a2a_bounded": ("native", "BoundedOpContender"),
    "ep_a2a_precast": ("native", "PrecastOpContender"),
    "ep_low_latency": ("low_latency", "LowLatencyLayerContender"),
    "ep_low_latency_traced": ("low_latency", "TracedLowLatencyLayerContender"),
    "ep_a2a_v1": ("nodes", "InterNodeV1Contender"),
    "ep_a2a_v1_ll": ("nodes", "InterNodeV1LLContender"),
    "ep_a2a_flat": ("nodes", "FlatContender"),
    "ep_a2a_staged": ("nodes", "StagedContender"),
    "ep_a2a_nvshmem": ("nodes", "NvshmemContender"),
    "ep_a2a_nvshmem_ll": ("nodes", "NvshmemLLContender"),
    "nccl_agrs": ("nccl", "AllGatherReduceScatterContender"),
    "nccl_all_to_all": ("nccl", "AllToAllContender"),
    "flashinfer": ("flashinfer", "FlashInferContender"),
    "deepep": ("deepep", "DeepEPContender"),
    "deepep_low_latency": ("deepep", "DeepEPLowLatencyContender"),
}
"""Module of this package and class, by name, in the order of reports."""

FORMER_NAMES = {"ep_a2a_rail": "ep_a2a_staged"}
"""Names of earlier versions, which older result files and command lines have."""

BETWEEN_NODES = tuple(name for name, (module, _) in CONTENDERS.items() if module == "nodes")
"""Kernels and transports that only several nodes have."""

ONLY_WHEN_NAMED = (
    "ep_low_latency", "ep_low_latency_traced", "ep_a2a_nvshmem", "ep_a2a_nvshmem_ll", "deepep_low_latency",
)  # fmt: skip
"""Not among the default contenders: interfaces on this package's op, NVSHMEM, and another mode of a contender."""

WITHOUT_EFFECT_ON_LIMIT = frozenset({"layout", "max_sms", "max_num_tokens", "gpus_per_node"})
"""Fields of a workload that make no difference to the wire's limit."""


def present_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a choice of contenders under today's names; logs each former one."""
    for name in FORMER_NAMES.keys() & set(names):
        logger.warning("contender %s is now %s; use that name", name, FORMER_NAMES[name])
    return tuple(dict.fromkeys(FORMER_NAMES.get(name, name) for name in names))


def check_names(names: tuple[str, ...]) -> None:
    """Checks a choice of contenders.

    Raises:
        UnknownNameError: a name is not in CONTENDERS.
    """
    for name in names:
        if name not in CONTENDERS:
            raise UnknownNameError(f"contenders out of {', '.join(CONTENDERS)}", repr(name))


def make_contender(name: str) -> Contender:
    """Returns the contender of this name.

    Raises:
        UnknownNameError: there is none.
    """
    check_names((name,))
    module, class_name = CONTENDERS[name]
    contender: Contender = getattr(importlib.import_module(f"ep_a2a.commands.bench.{module}"), class_name)()
    return contender
