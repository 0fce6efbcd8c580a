"""Defines what takes part in a benchmark: contenders, their sessions, and the check that every session passes."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch

from ep_a2a.errors import CheckFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from ep_a2a.commands.bench.workload import Workload


class BenchContext(Protocol):
    """This process's rank; `ep_a2a.testing.worker.RankContext` is one.

    Attributes:
        rank, world_size: this rank, and the number of ranks.
        device: `cpu`, or this rank's GPU, which is also the current CUDA device.
        group: all ranks; moves CPU tensors, and CUDA tensors where device is a GPU (`cpu:gloo,cuda:nccl`).
    """

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < world_size."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def device(self) -> torch.device:
        """The device of tensors."""

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks."""


class Session(abc.ABC):
    """One contender, ready to move one workload's tokens: memory allocated, inputs in place, experts' rows filled in.

    dispatch and combine alternate, on the current stream, and are all that is timed. On a GPU they only queue work,
    unless `graph_safe` is False.

    Attributes:
        graph_safe: dispatch and combine can be captured in a CUDA graph and replayed.
        details: remarks for the report, such as launch numbers.
    """

    graph_safe: bool = True

    def __init__(self) -> None:
        self.details: dict[str, Any] = {}

    @abc.abstractmethod
    def dispatch(self) -> Any:
        """Sends this rank's tokens to the ranks of their experts; returns what combine needs of it."""

    @abc.abstractmethod
    def combine(self, dispatched: Any) -> torch.Tensor:
        """Brings the experts' rows back and sums them: this rank's result `[T, H]`."""

    @abc.abstractmethod
    def check(self) -> None:
        """Runs a round trip with identity experts and compares it with what it must be. Collective.

        Raises:
            CheckFailedError: the result is wrong on this rank.
        """

    def check_timed(self) -> None:  # noqa: B027  most raise while they are timed
        """Looks, after the timing, for failures that kernels can only record. Local.

        Raises:
            EpA2AError: what was timed has not done its work.
        """

    def close(self) -> None:  # noqa: B027  nothing to give back is common
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

    def __init__(self, workload: Workload, context: BenchContext, contender: Contender) -> None:
        super().__init__()
        self._workload, self._context, self._name = workload, context, contender.name
        inputs = workload.inputs(context.rank, context.device)
        self._x, self._ids, self._weights = inputs.x, inputs.ids, inputs.weights

    def check(self) -> None:
        """Compares a round trip on the rows that will be timed."""
        self._check_result(self.combine(self.dispatch()))

    def _copies(self) -> torch.Tensor:
        """Factor that identity experts multiply each token by, `[T]`: the ranks that it goes to."""
        return self._workload.num_distinct_ranks(self._context.rank)

    def _check_result(self, result: torch.Tensor) -> None:
        check_round_trip(self._name, self._workload, self._x, self._copies(), result)


class Contender:
    """A way to do dispatch and combine. Making one costs nothing; libraries are imported in its methods.

    Attributes:
        name: as given to --contenders and shown in reports.
        session: makes a session of (workload, context, contender).
    """

    name: ClassVar[str]
    session: ClassVar[Callable[..., Session]]

    def unavailable(self, workload: Workload, device: torch.device) -> str | None:
        """Returns why this workload cannot be run on this machine, in words; None where it can. Local."""
        return None

    def prepare(self, workload: Workload, context: BenchContext) -> Session:
        """Returns a session for this workload, with the inputs that `workload.inputs(rank)` gives. Collective."""
        return type(self).session(workload, context, self)


def check_round_trip(name: str, workload: Workload, x: torch.Tensor, copies: torch.Tensor, got: torch.Tensor) -> None:
    """Compares a round trip through identity experts with x times the rows, or weights, that are summed per token.

    Args:
        name: whose result it is, for the error.
        workload: gives the tolerance.
        x: this rank's tokens `[T, H]`.
        copies: what identity experts multiply each token by, `[T]`: `workload.num_distinct_ranks(rank)` where rows are
            summed as they are, `workload.valid_weights(rank)` where router weights are applied on the way.
        got: `[T, H]` of any floating point dtype, on any device.

    Raises:
        CheckFailedError: a shape is wrong, a value is not finite, or an element is too far away.
    """
    if tuple(got.shape) != tuple(x.shape):
        raise CheckFailedError(f"a result {tuple(x.shape)} of {name}", f"{tuple(got.shape)}")
    want = x.to(torch.float32) * copies.to(x.device, torch.float32)[:, None]
    relative, absolute = workload.tolerance
    # Scales belong to rows, so what is small beside its row has lost more than its own last bits.
    allowed = relative * want.abs() + absolute * want.abs().amax(1, keepdim=True)
    error = (got.to(x.device, torch.float32) - want).abs()
    wrong = ~(error <= allowed)
    if wrong.any():
        token, element = (int(number) for number in wrong.nonzero()[0])
        raise CheckFailedError(
            f"{name} to return x times the rows summed: {want[token, element].item():g} in token {token}, "
            f"element {element}",
            f"{got[token, element].item():g}; {int(wrong.sum())} of {wrong.numel()} elements are off",
        )  # fmt: skip
