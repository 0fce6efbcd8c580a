"""A whole MoE layer, gate to combine, whose communication is a contender's.

All contenders run this code, so their layers differ in communication only; its casts and marks on padding count as
communication. The experts have fixed shapes and never wait on the host, so a CUDA graph can capture them.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from ep_a2a.commands.bench.layer_kernels import gather_rows_kernel, quantize_rows_kernel, sum_rows_kernel, swiglu_kernel
from ep_a2a.commands.measure.session import Received, Session
from ep_a2a.commands.measure.timing import Clock, capture
from ep_a2a.commands.measure.workload import Inputs, Workload
from ep_a2a.config import FP8_GROUP_SIZE, Layout, QuantType
from ep_a2a.errors import CheckFailedError, ConfigError, UnsupportedError
from ep_a2a.quantization import dequantize, quantize
from ep_a2a.reference import expert_mlp_rows
from ep_a2a.routing import expert_ranges

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ep_a2a.commands.measure.session import InputsRoundTrip
    from ep_a2a.commands.measure.timing import Timer
    from ep_a2a.testing.worker import RankContext

PAD_ID = -1
NUM_TRACED = 3
"""Layers in a trace."""
WEIGHTS_SEED = 77
MAX_CHECKED_TOKENS = 32
"""Tokens of each rank that are compared with the dense layer, which is slow."""
TOLERANCE = 2e-2
"""Norm of a row's error over the norm of the row: roundings to bf16 between the parts, and of the ranks' sums."""
MAX_BLOCK = 1024
NUM_WARPS = 4
PROGRAMS_PER_SM = 8
INTERPRETED_PROGRAMS = 2


@dataclass(frozen=True)
class LayerWorkload(Workload):
    """A layer, or a step of overlapped layers: bfloat16 tokens, layout rank_major, routed by the gate.

    Attributes:
        intermediate_dim: F, intermediate size of an expert.
        comm_sms: multiprocessors of ops where computation runs beside them; 0 = no bound.
    """

    is_layer: ClassVar[bool] = True
    intermediate_dim: int = 2048
    comm_sms: int = 0

    def check(self) -> None:
        """Raises ConfigError or UnsupportedError where no layer can run this workload, as `Workload.check` does."""
        super().check()
        if self.intermediate_dim < 1:
            raise ConfigError(">= 1", str(self.intermediate_dim), field="intermediate_dim")
        takes = {
            "layout": (Layout.RANK_MAJOR,),
            "dtype": (torch.bfloat16,),
            "quant_type": (QuantType.NONE, QuantType.FP8_PER_1X128),
            "combine_quant": (QuantType.NONE,),
            "routing": ("uniform",),
            "max_num_tokens": (self.num_tokens,),
            "gpus_per_node": (0,),
        }
        for name, values in takes.items():
            if getattr(self, name) not in values:
                expected = f"{' or '.join(map(str, values))} of a layer"
                raise UnsupportedError(expected, str(getattr(self, name)), field=name)


class MoEWeights(NamedTuple):
    """Weights of the layer on one rank, bf16; E own experts out of num_experts.

    Attributes:
        router: `[H, num_experts]`, the same on all ranks.
        w1: gate and up projections `[E, 2F, H]`.
        w2: down projections `[E, H, F]`.
        first_expert: global id of the first own expert.
    """

    router: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    first_expert: int


def make_weights(workload: LayerWorkload, context: RankContext) -> MoEWeights:
    """Returns random weights that keep the magnitude of activations."""
    device, hidden_dim, width = context.device, workload.hidden_dim, workload.intermediate_dim
    first, end = expert_ranges(workload.num_experts, workload.world_size)[context.rank]
    shared = torch.Generator(device).manual_seed(WEIGHTS_SEED)
    own = torch.Generator(device).manual_seed(WEIGHTS_SEED + 1 + context.rank)

    def draw(generator: torch.Generator, *shape: int, fan_in: int, gain: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
        return drawn.mul_(gain / fan_in**0.5)

    return MoEWeights(
        # Tokens have a standard deviation of 0.1: the gain makes logits that tell experts apart.
        router=draw(shared, hidden_dim, workload.num_experts, fan_in=hidden_dim, gain=20.0),
        w1=draw(own, end - first, 2 * width, hidden_dim, fan_in=hidden_dim),
        w2=draw(own, end - first, hidden_dim, width, fan_in=width),
        first_expert=first,
    )


class Gate:
    """The router of one batch, with results at fixed addresses.

    Args:
        x: tokens bf16 `[T, H]`, read again at each call.
        router: bf16 `[H, num_experts]`.
        topk: K.

    Attributes:
        weights: float32 `[T, K]`, softmax over all experts, of the K largest. ids: int32 `[T, K]`.
    """

    def __init__(self, x: torch.Tensor, router: torch.Tensor, topk: int) -> None:
        self.x, self._router = x, router
        self.weights = torch.zeros(x.shape[0], topk, device=x.device)
        self.ids = torch.zeros(x.shape[0], topk, dtype=torch.int32, device=x.device)
        self._wide_ids = torch.zeros(x.shape[0], topk, dtype=torch.int64, device=x.device)

    def __call__(self) -> None:
        """Fills weights and ids."""
        probabilities = torch.softmax(self.x @ self._router, dim=1, dtype=torch.float32)
        torch.topk(probabilities, self.ids.shape[1], dim=1, out=(self.weights, self._wide_ids))
        self.ids.copy_(self._wide_ids)


class WholeLayer(Session):
    """Something that runs a layer, gate to combine, with the same results however it does so. Graph-safe.

    Args:
        workload: shapes.
        context: this rank and its group.
    """

    def __init__(self, workload: LayerWorkload, context: RankContext) -> None:
        super().__init__()
        self.workload, self.context = workload, context

    @abc.abstractmethod
    def run(self) -> Any:
        """Runs the layer; returns its result."""

    @abc.abstractmethod
    def computation(self) -> Callable[[], Any]:
        """Returns the same computation without communication, on a copy of received rows. Collective."""

    def measure(self, timer: Timer) -> dict[str, Any]:
        """Returns `layer_us`, and `compute_us` of the same computation alone."""
        return {"layer_us": timer.median_us(self.run), "compute_us": timer.median_us(self.computation())}

    def check_timed(self) -> None:
        """Compares one more run with the dense layer."""
        self.check()

    def trace(self, path: Path) -> None:
        """Writes a Chrome trace of a few runs, on a GPU replayed from a CUDA graph, by rank 0."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.context.device.type == "cuda"

        def work() -> None:
            for _ in range(NUM_TRACED):
                self.run()

        run = capture(work, work, Clock(self.context)).replay if on_gpu else work
        run()
        with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
            run()
            if on_gpu:
                torch.cuda.synchronize()
        if self.context.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))


class Layer(WholeLayer):
    """A layer over a round trip of its gate's tokens, whose parts follow one another.

    Args:
        workload: shapes.
        context: this rank and its group.
        make: makes the round trip; takes the workload, the context and the gate's inputs.
        model: tokens with their gate, and the weights; None makes those of the workload.
    """

    def __init__(
        self,
        workload: LayerWorkload,
        context: RankContext,
        make: Callable[..., InputsRoundTrip],
        model: tuple[Gate, MoEWeights] | None = None,
    ) -> None:
        super().__init__(workload, context)
        if model is None:
            weights = make_weights(workload, context)
            model = Gate(workload.inputs(context.rank, context.device).x, weights.router, workload.topk), weights
        self.gate, self.weights = model
        # Communication is made with ids and weights that could come.
        self.gate()
        self.communication: Any = make(workload, context, Inputs(self.gate.x, self.gate.ids, self.gate.weights))
        self.details = self.communication.details

    def run_to_experts(self) -> tuple[Any, Received]:
        """Runs gate, cast and dispatch; returns what dispatch returned, also as the experts take it."""
        self.gate()
        communication = self.communication
        if communication.scales is not None:
            quantize_rows(self.gate.x, communication.sent, communication.scales)
        dispatched = communication.dispatch()
        return dispatched, communication.received(dispatched)

    def run(self) -> torch.Tensor:
        """Runs the whole layer, part after part."""
        dispatched, received = self.run_to_experts()
        run_experts(received, self.weights)
        result: torch.Tensor = self.communication.combine(dispatched)
        return result

    def computation(self) -> Callable[[], torch.Tensor]:
        """Returns the same gate and experts on a copy of received rows. Collective."""
        dispatched, received = self.run_to_experts()
        copy = Received(*(None if each is None else each.clone() for each in received))  # type: ignore[arg-type]
        self.communication.combine(dispatched)

        def compute() -> torch.Tensor:
            self.gate()
            run_experts(copy, self.weights)
            return copy.out

        return compute

    def check(self) -> None:
        """Compares a run with the dense layer."""
        result = self.run()
        require_rows(result, dense_layer(self.workload, self.gate, self.weights, self.context))

    def close(self) -> None:
        """Closes the round trip."""
        self.communication.close()


def layer_over(make: Callable[..., InputsRoundTrip]) -> Callable[..., Layer]:
    """Returns what makes a layer over the round trips that `make` makes."""
    return partial(Layer, make=make)


class SortedPairs(NamedTuple):
    """The (row, own expert) pairs in the order of experts, and where each lies; N = R * K.

    Attributes:
        pairs: int32 `[N + 1]`, row * K + k of the pair in each slot; anything past the last one.
        slots: int32 `[R, K]`, where a pair lies; -1 where the expert is not this rank's.
        ends: int32 `[E]`, one past the last slot of each own expert; the last one is the number of pairs.
    """

    pairs: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor


def sort_pairs(ids: torch.Tensor, first_expert: int, num_local: int) -> SortedPairs:
    """Returns the pairs of this rank's experts in the stable order of experts, by counting: no sort, no host wait.

    Args:
        ids: global expert ids int32 `[R, K]`.
        first_expert, num_local: this rank's experts.
    """
    num_pairs = ids.numel()
    local = ids.reshape(-1) - first_expert
    is_local = (local >= 0) & (local < num_local)
    experts = torch.arange(num_local, dtype=torch.int32, device=ids.device)
    # One running count through expert after expert gives every pair the number of its slot.
    counted = torch.cumsum((local[None, :] == experts[:, None]).view(-1), 0, dtype=torch.int32).view(num_local, -1)
    own = counted.gather(0, local.clamp(0, num_local - 1).to(torch.int64)[None, :])[0] - 1
    slots = torch.where(is_local, own, -1)
    pairs = torch.zeros(num_pairs + 1, dtype=torch.int32, device=ids.device)
    numbers = torch.arange(num_pairs, dtype=torch.int32, device=ids.device)
    pairs.scatter_(0, torch.where(is_local, own, num_pairs).to(torch.int64), numbers)
    return SortedPairs(pairs, slots.view_as(ids), counted[:, -1].contiguous())


def run_experts(received: Received, weights: MoEWeights) -> None:
    """Runs this rank's experts on the received rows: SwiGLU, router weights, sums per row into `received.out`."""
    rows, scales, ids, row_weights, out = received
    num_rows, hidden_dim = rows.shape
    topk, width, device = ids.shape[1], weights.w2.shape[2], rows.device
    pairs, slots, ends = sort_pairs(ids, weights.first_expert, weights.w1.shape[0])
    count = ends[-1:]
    inputs = torch.empty(pairs.numel(), hidden_dim, dtype=torch.bfloat16, device=device)
    wide = {"TOPK": topk, "HIDDEN": hidden_dim, "BLOCK": block_of(hidden_dim)}
    factors, group = (row_weights, 0) if scales is None else (scales, FP8_GROUP_SIZE)
    launch(gather_rows_kernel, device, rows, factors, pairs, count, inputs, **wide, GROUP=group)
    projected = grouped_matmul(inputs, weights.w1, ends)
    activated = torch.empty(pairs.numel(), width, dtype=torch.bfloat16, device=device)
    launch(swiglu_kernel, device, projected, row_weights, pairs, count, activated, WIDTH=width, BLOCK=block_of(width))
    contributions = grouped_matmul(activated, weights.w2, ends)
    launch(sum_rows_kernel, device, contributions, slots, out, num_rows, **wide)


def grouped_matmul(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies rows of group e by matrices[e] transposed; groups are consecutive, later rows give anything.

    Args:
        rows: bf16 `[N, in]`, N above the last end.
        matrices: bf16 `[E, out, in]`.
        ends: int32 `[E]`, one past each group's last row.

    Returns:
        bf16 `[N, out]`.
    """
    grouped: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if rows.device.type == "cuda" and grouped is not None:
        result: torch.Tensor = grouped(rows, matrices.transpose(1, 2), offs=ends)
        return result
    out = rows.new_zeros(rows.shape[0], matrices.shape[1])
    start = 0
    for matrix, end in zip(matrices, ends.tolist()):
        out[start:end] = rows[start:end] @ matrix.T
        start = end
    return out


def quantize_rows(rows: torch.Tensor, quantized: torch.Tensor, scales: torch.Tensor) -> None:
    """Casts rows with one float32 scale per 128 elements, bit-equal to `quantize_per_1x128`.

    Args:
        rows: bf16, fp16 or fp32 `[T, H]`, H a multiple of 128.
        quantized: float8_e4m3fn `[T, H]`, written.
        scales: float32 `[T, H / 128]`, written.
    """
    num_groups = scales.shape[1]
    sizes = {"GROUPS": num_groups, "GROUPS_LANES": 1 << (num_groups - 1).bit_length(), "GROUP": FP8_GROUP_SIZE}
    parts = (rows, quantized.view(torch.uint8), scales.view(torch.int32))
    launch(quantize_rows_kernel, rows.device, *parts, rows.shape[0], **sizes)


def launch(kernel: Any, device: torch.device, *args: Any, **constants: Any) -> None:
    """Runs a kernel of layer_kernels.py with as many programs as the device holds; on CPU in the interpreter."""
    if device.type == "cpu":
        kernel.interpret((INTERPRETED_PROGRAMS,), *args, **constants)
        return
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    kernel[(num_sms * PROGRAMS_PER_SM,)](*args, **constants, num_warps=NUM_WARPS)


def block_of(width: int) -> int:
    """Returns the number of elements that a program handles at once."""
    return min(1 << (width - 1).bit_length(), MAX_BLOCK)


def dense_layer(workload: LayerWorkload, gate: Gate, weights: MoEWeights, context: RankContext) -> torch.Tensor:
    """Returns the first rows of this rank's dense layer in float32: every rank adds its experts' part. Collective.

    Args:
        workload: says how tokens are quantised on the way.
        gate: has been run; gives tokens, ids and router weights.
        weights: this rank's.
        context: this rank and its group.
    """
    num_checked = min(MAX_CHECKED_TOKENS, workload.num_tokens)
    x = gate.x[:num_checked]
    if workload.quant_type != QuantType.NONE:
        x = dequantize(*quantize(x, workload.quant_type), workload.quant_type)
    want = torch.empty(0)
    for source in range(context.world_size):
        tokens, ids, row_weights = (
            each[:num_checked].to(dtype, copy=True)
            for each, dtype in ((x, torch.float32), (gate.ids, torch.int32), (gate.weights, torch.float32))
        )
        for each in (tokens, ids, row_weights):
            dist.broadcast(each, source, group=context.group)
        part = expert_mlp_rows(
            tokens, ids - weights.first_expert, row_weights, weights.w1, weights.w2, 0, weights.w1.shape[0]
        )
        dist.all_reduce(part, group=context.group)
        if source == context.rank:
            want = part
    return want


def require_rows(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares the first rows of a layer's result `[T, H]` with those of the dense layer.

    Raises:
        CheckFailedError: a row is too far off.
    """
    error = (got[: len(want)].float() - want).norm(dim=1)
    allowed = TOLERANCE * want.norm(dim=1)
    if not bool((error <= allowed).all()):
        token = int((error - allowed).nan_to_num(torch.inf).argmax())
        raise CheckFailedError(
            f"the dense layer's rows within {TOLERANCE:g} of their norms",
            f"{float(error[token]):g} off where the norm is {float(want[token].norm()):g}, in token {token}",
        )
