"""What takes part in a benchmark: the interface of every contender, and the check that all of them must pass."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch

from ep_a2a.errors import CheckFailedError

if TYPE_CHECKING:
    import torch.distributed as dist

    from ep_a2a.commands.bench.workload import Workload


class BenchContext(Protocol):
    """Who this process is; `ep_a2a.testing.worker.RankContext` is one.

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
        """Where tensors lie."""

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks."""


class Session(abc.ABC):
    """One contender, ready to move one workload's tokens: memory allocated, inputs in place, experts' rows filled in.

    dispatch and combine alternate, on the current stream, and are all that is timed. On a GPU they only queue work,
    unless `graph_safe` is False.

    Attributes:
        graph_safe: dispatch and combine can be captured in a CUDA graph and replayed.
        details: what else a reader of the row must know (launch numbers, say), for the report.
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


class Contender(abc.ABC):
    """A way to do dispatch and combine. Making one costs nothing; libraries are imported in its methods.

    Attributes:
        name: as given to --contenders and shown in reports.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def unavailable(self, workload: Workload, device: torch.device) -> str | None:
        """Why this workload cannot be run on this machine, in words for the report; None where it can. Local."""

    @abc.abstractmethod
    def prepare(self, workload: Workload, context: BenchContext) -> Session:
        """A session for this workload, with the inputs that `workload.inputs(rank)` gives. Collective."""


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
