"""Makes the points of a sweep: all combinations of the requested values."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any

from ep_a2a.commands.bench.contenders import BETWEEN_NODES, CONTENDERS, NATIVE, ONLY_WHEN_NAMED
from ep_a2a.commands.bench.timing import TimingSettings
from ep_a2a.commands.bench.workload import Workload
from ep_a2a.config import (
    ALIGNMENT_BYTES,
    COMBINE_DTYPES,
    COMBINE_QUANT_TYPES,
    DISPATCH_QUANT_TYPES,
    FP8_GROUP_SIZE,
    Layout,
    QuantType,
)
from ep_a2a.errors import ConfigError, TopKError, UnknownNameError
from ep_a2a.routing import ROUTINGS

SAME = "same"
"""Value of max_num_tokens that stands for num_tokens."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in COMBINE_DTYPES}


@dataclass(frozen=True)
class Sweep:
    """Values of each field of Workload, in the order in which points come: the last field varies fastest.

    But for max_sms, which varies faster still: the times of one workload under several bounds come one after another.

    dtype holds names in DTYPES; max_num_tokens holds numbers as text, or SAME.
    """

    world_size: tuple[int, ...]
    hidden_dim: tuple[int, ...]
    topk: tuple[int, ...]
    num_experts: tuple[int, ...]
    dtype: tuple[str, ...]
    quant_type: tuple[str, ...]
    combine_quant: tuple[str, ...]
    layout: tuple[str, ...]
    routing: tuple[str, ...]
    max_sms: tuple[int, ...]
    gpus_per_node: tuple[int, ...]
    max_num_tokens: tuple[str, ...]
    num_tokens: tuple[int, ...]

    def points(self) -> list[Workload]:
        """Returns all combinations.

        Raises:
            ConfigError, TopKError, UnknownNameError: a combination that nothing can run; it is named.
        """
        names = sorted((field.name for field in fields(self)), key="max_sms".__eq__)
        values = [getattr(self, name) for name in names]
        return [_workload(dict(zip(names, chosen, strict=True))) for chosen in itertools.product(*values)]


@dataclass(frozen=True)
class Defaults:
    """Values of options that are not given; num_ranks None takes all GPUs."""

    num_ranks: int | None
    contenders: tuple[str, ...]
    num_tokens: tuple[int, ...]
    hidden_dim: int
    topk: int
    num_experts: int
    quant_type: str
    timing: TimingSettings


_ON_GPUS = tuple(name for name in CONTENDERS if name not in (*BETWEEN_NODES, *ONLY_WHEN_NAMED))
# In the interpreter a step of the op takes seconds, so its variants run only when named.
_ON_CPU = tuple(name for name in _ON_GPUS if not name.startswith(f"{NATIVE}_"))

DEFAULTS = {
    "cuda": Defaults(None, _ON_GPUS, (1, 16, 32, 128, 512, 4096), 7168, 8, 256, "fp8_per_1x128", TimingSettings()),
    "cpu": Defaults(2, _ON_CPU, (1, 4, 16), 256, 4, 16, "fp8_per_1x128", TimingSettings(0, 2, 1, 0)),
}
"""By kind of device: DeepSeek-V3 on GPUs, something small for the interpreter."""


def _workload(values: dict[str, Any]) -> Workload:
    for name, allowed in (
        ("dtype", DTYPES), ("quant_type", DISPATCH_QUANT_TYPES), ("combine_quant", COMBINE_QUANT_TYPES),
        ("layout", tuple(Layout)), ("routing", ROUTINGS),
    ):  # fmt: skip
        if values[name] not in allowed:
            raise UnknownNameError(f"{name} to be one of {', '.join(map(str, allowed))}", repr(values[name]))
    bound = values["max_num_tokens"]
    if bound != SAME and not bound.isdecimal():
        raise ConfigError(f"max_num_tokens to be a number or {SAME!r}", repr(bound))
    max_num_tokens = values["num_tokens"] if bound == SAME else int(bound)
    workload = Workload(**values | {"max_num_tokens": max_num_tokens, "dtype": DTYPES[values["dtype"]]})
    _check(workload)
    return workload


def _check(workload: Workload) -> None:
    for name in ("world_size", "num_tokens", "hidden_dim", "topk", "num_experts"):
        if getattr(workload, name) < 1:
            raise ConfigError(f"{name} >= 1", str(getattr(workload, name)))
    if workload.max_sms < 0:
        raise ConfigError("max_sms >= 0", str(workload.max_sms))
    if workload.gpus_per_node < 0 or (workload.gpus_per_node and workload.world_size % workload.gpus_per_node):
        raise ConfigError(
            f"gpus_per_node to divide {workload.world_size} ranks, or 0 for one node", str(workload.gpus_per_node)
        )
    if workload.max_num_tokens < workload.num_tokens:
        raise ConfigError(
            f"max_num_tokens >= num_tokens {workload.num_tokens}", str(workload.max_num_tokens),
            f"Raise it, or say {SAME!r}.",
        )  # fmt: skip
    if workload.topk > workload.num_experts:
        raise TopKError(f"topk <= {workload.num_experts}, the number of experts", str(workload.topk), "Lower --topk.")
    casts = {workload.quant_type, workload.combine_quant}
    step = ALIGNMENT_BYTES // (workload.dtype.itemsize if casts == {QuantType.NONE} else 1)
    if casts & {QuantType.FP8_PER_1X128, QuantType.FP8_BLOCKWISE}:
        step = FP8_GROUP_SIZE
    if workload.hidden_dim % step:
        raise ConfigError(f"hidden_dim to be a multiple of {step} with these casts", str(workload.hidden_dim))
