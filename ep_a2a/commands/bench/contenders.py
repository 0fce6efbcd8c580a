"""Defines what takes part in a benchmark: contenders by name, their sessions, and the check of every session."""

from __future__ import annotations

import abc
import importlib
import importlib.util
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from ep_a2a.errors import CheckFailedError, UnknownNameError
from ep_a2a.quantization import dequantize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext

LIMIT = "wire_limit"
NATIVE = "ep_a2a"

logger = logging.getLogger(__name__)

_NAMES = {
    "wire_limit": (LIMIT,),
    "native": (NATIVE, "ep_a2a_bounded", "ep_a2a_precast"),
    "low_latency": ("ep_low_latency", "ep_low_latency_traced"),
    "nodes": ("ep_a2a_v1", "ep_a2a_v1_ll", "ep_a2a_flat", "ep_a2a_staged", "ep_a2a_nvshmem", "ep_a2a_nvshmem_ll"),
    "nccl": ("nccl_agrs", "nccl_all_to_all"),
    "flashinfer": ("flashinfer",),
    "deepep": ("deepep", "deepep_low_latency"),
}
CONTENDERS = {name: module for module, names in _NAMES.items() for name in names}
"""Module of this package by contender, in the order of reports. Modules and their libraries load at first use."""

FORMER_NAMES = {"ep_a2a_rail": "ep_a2a_staged"}
"""Present name by the name in older result files and command lines."""

BETWEEN_NODES = _NAMES["nodes"]
"""Kernels and transports that only several nodes have."""

ON_SHARED_GPUS = frozenset(
    (LIMIT, *_NAMES["native"], *_NAMES["low_latency"], "ep_a2a_v1", "ep_a2a_v1_ll", "ep_a2a_flat", "ep_a2a_staged")
)
"""Contenders that keep to a share of a GPU. Programs of others would wait for programs that find no room."""

ONLY_WHEN_NAMED = (*_NAMES["low_latency"], "ep_a2a_nvshmem", "ep_a2a_nvshmem_ll", "deepep_low_latency")
"""Contenders that no default includes: interfaces on this package's op, NVSHMEM, another mode of a contender."""

WITHOUT_EFFECT_ON_LIMIT = frozenset({"layout", "max_sms", "max_num_tokens", "gpus_per_node"})
"""Fields of a workload that make no difference to the wire limit. Where ranks share a GPU, max_sms bounds it."""


def present_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a choice of contenders under their present names; logs each former one."""
    for name in FORMER_NAMES.keys() & set(names):
        logger.warning("contender %s is now %s; use that name", name, FORMER_NAMES[name])
    return tuple(dict.fromkeys(FORMER_NAMES.get(name, name) for name in names))


def check_names(names: Iterable[str]) -> None:
    """Checks a choice of contenders.

    Raises:
        UnknownNameError: a name is not in CONTENDERS.
    """
    for name in names:
        if name not in CONTENDERS:
            raise UnknownNameError(f"out of {', '.join(CONTENDERS)}", repr(name), field="contenders")


def make_contender(name: str) -> Contender:
    """Returns the contender of this name: the one in its module's tuple `CONTENDERS`.

    Raises:
        UnknownNameError: there is none.
    """
    check_names([name])
    module = importlib.import_module(f"ep_a2a.commands.bench.{CONTENDERS[name]}")
    contender: Contender = next(each for each in module.CONTENDERS if each.name == name)
    return contender


@dataclass
class Contender:
    """A way to do dispatch and combine. Making one costs nothing; its methods import libraries.

    Attributes:
        name: as given to --contenders and shown in reports.
        session: makes a session of (workload, context, contender).
    """

    name: str
    session: Callable[..., Session]

    def unavailable(self, workload: Workload, device: torch.device) -> str | None:
        """Returns why this workload cannot run on this machine, in words; None where it can. Local."""
        return None

    def prepare(self, workload: Workload, context: RankContext) -> Session:
        """Returns a session for this workload, with the inputs that `workload.inputs(rank)` gives. Collective."""
        return self.session(workload, context, self)


class Session(abc.ABC):
    """A contender that is ready to move one workload's tokens: it has its memory, inputs and experts' rows.

    dispatch and combine alternate, on the current stream, and are all that is timed. On a GPU they only queue work, so
    that a CUDA graph can capture and replay them.

    Attributes:
        details: remarks for the report, such as launch numbers.
    """

    def __init__(self) -> None:
        self.details: dict[str, Any] = {}

    @abc.abstractmethod
    def dispatch(self) -> Any:
        """Sends this rank's tokens to the ranks of their experts; returns what combine needs of it."""

    @abc.abstractmethod
    def combine(self, dispatched: Any) -> torch.Tensor:
        """Brings the experts' rows back and sums them: this rank's result `[T, H]`."""

    def round_trip(self) -> torch.Tensor:
        """Runs dispatch, then combine; returns combine's result."""
        return self.combine(self.dispatch())

    @abc.abstractmethod
    def check(self) -> None:
        """Runs a round trip with identity experts and compares the result with the expected one. Collective.

        Raises:
            CheckFailedError: the result is wrong on this rank.
        """

    def check_timed(self) -> None:  # noqa: B027  most raise while they are timed
        """Checks, after the timing, for failures that kernels can only record. Local.

        Raises:
            EpA2AError: a timed call has not done its work.
        """

    def close(self) -> None:  # noqa: B027  some hold nothing
        """Gives memory and communicators back. Called once, on every rank."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InputsSession(Session):
    """A session that holds one rank's inputs and is checked by a round trip.

    Args:
        workload: what moves.
        context: this rank.
        contender: whose session it is.
    """

    def __init__(self, workload: Workload, context: RankContext, contender: Contender) -> None:
        super().__init__()
        self._workload, self._context, self._name = workload, context, contender.name
        inputs = workload.inputs(context.rank, context.device)
        self._x, self._ids, self._weights = inputs.x, inputs.ids, inputs.weights

    def check(self) -> None:
        """Compares a round trip on the rows that will be timed."""
        self._check_result(self.round_trip())

    def _copies(self) -> torch.Tensor:
        """Returns the factor of identity experts for each token, `[T]`: the number of ranks that it goes to."""
        return self._workload.num_distinct_ranks(self._context.rank)

    def _rows_of(self, tokens: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Returns received tokens `[..., H]` in the workload's dtype, times their scales where they have any."""
        if scales is None:
            return tokens
        flat_scales = scales.reshape(-1, scales.shape[-1])
        rows = dequantize(tokens.flatten(0, -2), flat_scales, self._workload.quant_type, self._workload.dtype)
        return rows.view(tokens.shape)

    def _check_result(self, result: torch.Tensor) -> None:
        check_round_trip(self._name, self._workload, self._x, self._copies(), result)


def unavailable_on(device: torch.device, packages: Mapping[str, str]) -> str | None:
    """Returns why a library for GPUs cannot run on this device: it is no GPU, or a package is missing.

    Args:
        device: of this rank.
        packages: what to say where a module is missing, by module.
    """
    if device.type != "cuda":
        return "needs GPUs"
    return next((text for module, text in packages.items() if importlib.util.find_spec(module) is None), None)


def first_true(reasons: Mapping[str, bool]) -> str | None:
    """Returns the first reason that applies; None where none does."""
    return next((reason for reason, applies in reasons.items() if applies), None)


def check_round_trip(name: str, workload: Workload, x: torch.Tensor, copies: torch.Tensor, got: torch.Tensor) -> None:
    """Compares a round trip through identity experts with x times the rows, or weights, that are summed per token.

    Args:
        name: whose result it is, for the error.
        workload: gives the tolerance.
        x: this rank's tokens `[T, H]`.
        copies: factor that identity experts multiply each token by, `[T]`: `workload.num_distinct_ranks(rank)` where
            rows are summed as they are, `workload.valid_weights(rank)` where router weights are applied on the way.
        got: `[T, H]` of any floating point dtype, on any device.

    Raises:
        CheckFailedError: a shape is wrong, a value is not finite, or an element is too far away.
    """
    if tuple(got.shape) != tuple(x.shape):
        raise CheckFailedError(f"a result {tuple(x.shape)} of {name}", f"{tuple(got.shape)}")
    want = x.to(torch.float32) * copies.to(x.device, torch.float32)[:, None]
    relative, absolute = workload.tolerance
    # Rows have scales: an element that is small beside its row loses more than its own last bits.
    allowed = relative * want.abs() + absolute * want.abs().amax(1, keepdim=True)
    error = (got.to(x.device, torch.float32) - want).abs()
    wrong = ~(error <= allowed)
    if wrong.any():
        token, element = (int(number) for number in wrong.nonzero()[0])
        raise CheckFailedError(
            f"{name} to return x times the rows summed: {want[token, element].item():g} in token {token}, "
            f"element {element}",
            f"{got[token, element].item():g}; {int(wrong.sum())} of {wrong.numel()} elements are off",
        )
