"""Counting kernels in Triton's interpreter and for GPUs, what is read from them, and what their calls need compiled."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_a2a.config import EpDispatchCombineKernelType
from ep_a2a.errors import StateError, UnsupportedError
from ep_a2a.integrations.counters import LayerCounters
from ep_a2a.integrations.manager import read_counters
from ep_a2a.integrations.vllm.worker import RPC_METHOD
from ep_a2a.interface import DispatchCombineOp
from ep_a2a.kernels import primitives
from ep_a2a.kernels.counter_kernels import Counter
from ep_a2a.kernels.layout import Region
from ep_a2a.ops.arguments import RECEIVE, SEND, WHOLE, CombineArguments, DispatchArguments, Stages
from ep_a2a.ops.intra_node import IntraNodeEngine, dispatch_kernel
from ep_a2a.ops.op import EpDispatchCombineOp
from ep_a2a.policy import Phase, dispatch_phase
from ep_a2a.telemetry.counters import InstrumentedOp, StepCounters, _kernels
from tests.offline_compile import compile_kernel
from tests.unit.device import table_of
from tests.unit.test_config import config_of

CPU = torch.device("cpu")
NUM_SMS = 132


class Clock:
    """Stands in for the clock of interpreted kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 10**15
        monkeypatch.setattr(primitives, "time", SimpleNamespace(monotonic_ns=lambda: self.ns, sleep=lambda _secs: None))


class Layer:
    """Launches by hand: COUNTS as peers would have left them, between the stages of a step."""

    def __init__(self, rank: int, world_size: int, num_kept_steps: int, clock: Clock) -> None:
        self.rank, self.clock, self.num_done = rank, clock, 0
        self.counters = StepCounters(CPU, num_kept_steps)
        self.config = config_of(rank=rank, world_size=world_size, num_experts_per_rank=2)
        self.counts = torch.zeros(world_size, world_size + 1, dtype=torch.int64)
        self.poison = torch.zeros(1, dtype=torch.int32)
        limits = torch.full((2,), 10**9)
        regions = {Region.COUNTS: self.counts, Region.POISON: self.poison, Region.LIMITS: limits}
        self.table = table_of(world_size, {(region, rank): tensor for region, tensor in regions.items()})
        self.start, self.dispatch, self.combine = _kernels(world_size, CPU)

    def step(
        self, rows: list[list[int]], dispatch_ns: int, combine_ns: int, num_tokens: int = 5, late: tuple[int, ...] = ()
    ) -> None:
        """Rows [source][destination]; lines of `late` sources are of the step before, and the step has failed."""
        self.poison.fill_(bool(late))
        for source, line in enumerate(rows):
            epoch = self.num_done + (source not in late)
            self.counts[source] = torch.tensor([*line, 0]) | epoch << 32
        lines, kept = self.counters.lines, self.counters.num_kept_steps
        self._wait(dispatch_ns)
        self.dispatch.interpret(1, (lines, self.table, num_tokens, kept, self.rank))
        self._wait(combine_ns)
        self.combine.interpret(1, (lines, kept))
        self.num_done += 1
        self.table[-4:] = self.num_done << 16

    def _wait(self, wait_ns: int) -> None:
        self.start.interpret(1, (self.counters.lines,))
        self.clock.ns += wait_ns

    def read(self) -> dict[str, Any]:
        return self.counters.read(self.config)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_step_is_counted_from_what_all_ranks_have_told(clock):
    layer = Layer(1, 3, 2, clock)
    layer.step([[1, 2, 3], [10, 20, 30], [100, 200, 400]], dispatch_ns=2500, combine_ns=1000, num_tokens=7)
    row_bytes = layer.config.hidden_dim * 2
    step = {
        "num_tokens": 7,
        "num_kept_rows": 20,
        "num_sent_rows": 40,
        "num_received_rows": 202,
        "sent_bytes": 242 * row_bytes,
        "received_bytes": 242 * row_bytes,
        "rank_rows": 766 / 3,
        "skew_rows": pytest.approx(433 - 766 / 3),
        "dispatch_wait_us": 2.5,
        "combine_wait_us": 1.0,
    }
    largest = {"max_skew_rows": step["skew_rows"], "max_dispatch_wait_us": 2.5, "max_combine_wait_us": 1.0}
    assert layer.read() == {"num_steps": 1, **step, **largest, "latest_steps": [{"step": 1, **step}]}


def test_the_largest_wait_begins_anew_after_clear(clock):
    layer = Layer(0, 2, 3, clock)
    for wait_ns in (7000, 1000):
        layer.counters.clear()
        layer.step([[1, 1], [1, 1]], wait_ns, wait_ns)
        assert layer.read()["max_dispatch_wait_us"] == layer.read()["dispatch_wait_us"] == wait_ns / 1000


def test_what_a_failed_dispatch_did_not_wait_for_is_not_counted(clock):
    layer = Layer(0, 2, 2, clock)
    layer.step([[1, 2], [4, 8]], 1000, 1000)
    layer.step([[1, 2], [4, 8]], 1000, 1000, late=(1,))
    assert [each["num_received_rows"] for each in layer.read()["latest_steps"]] == [4, 0]
    assert [each["num_sent_rows"] for each in layer.read()["latest_steps"]] == [2, 2]


@pytest.mark.parametrize("world_size", [1, 5, 64])
def test_any_number_of_ranks(clock, world_size):
    layer = Layer(world_size - 1, world_size, 1, clock)
    layer.step([[source + 1] * world_size for source in range(world_size)], 1000, 1000)
    got = layer.read()
    total = world_size * (world_size + 1) // 2
    assert got["num_kept_rows"] == world_size
    assert got["num_sent_rows"] == world_size * (world_size - 1)
    assert got["num_received_rows"] == total - world_size
    assert (got["rank_rows"], got["skew_rows"]) == (total, 0)


def test_lines_do_not_overlap():
    assert len(Counter) == len({int(each) for each in Counter})
    assert StepCounters(CPU, 7).lines.shape == (8, 16)


@pytest.mark.parametrize(
    ("capability", "world_size"),
    [(90, 8), *(pytest.param(*each, marks=pytest.mark.full) for each in ((90, 1), (90, 2), (80, 1), (80, 2), (80, 8)))],
)
def test_the_kernels_compile_for_gpus(world_size, capability):
    lines, table = (torch.zeros(64, dtype=torch.int64) for _ in range(2))
    arguments = [(lines,), (lines, table, 1, 1, 0), (lines, 1)]
    for variant, values in zip(_kernels(world_size, CPU), arguments):
        ptx = compile_kernel(variant, values, capability)["ptx"]
        # only the count of a dispatch waits for what peers write
        waits = variant.kernel.__name__ == "count_dispatch_kernel"
        assert ptx.count("%globaltimer") == (2 if waits else 1)
        assert ("ld.volatile" in ptx) == waits


@pytest.mark.parametrize("layout", ["rank_major", "compact"])
def test_the_halves_that_a_step_needs_are_compiled_beforehand(layout):
    """Of a step that is captured before any like it has run."""
    config = config_of(
        rank=0, world_size=2, num_experts_per_rank=4, max_num_inp_token_per_rank=4096, layout=layout, hidden_dim=1024
    )
    engine = IntraNodeEngine(config, torch.zeros(64, 2, dtype=torch.int64), CPU)
    kernels = engine.kernels
    kernels.num_sms, kernels.can_depend, kernels.interpreted = NUM_SMS, True, False
    word, floats = torch.empty(16, dtype=torch.int32), torch.empty(16, dtype=torch.float32)
    rows = torch.empty(16, dtype=config.data_type)
    listed = {
        stages: {id(variant) for variant, _ in engine.compiled_kernels(stages)} for stages in (WHOLE, SEND, RECEIVE)
    }
    assert not listed[SEND] & listed[WHOLE] - {id(kernels.count)}

    def needed(tokens: int, stages: Stages) -> list[Any]:
        phase = dispatch_phase(config, tokens)
        dispatch = DispatchArguments(rows, None, floats, word, tokens, tokens, 1, -1, 1)
        launches = [engine.launch_of(each, tokens, tokens) for each in (phase, Phase.COMBINE)]
        combine = CombineArguments(rows, None, None, rows, tokens, tokens)
        return [
            dispatch_kernel(kernels, dispatch, phase, launches[0], stages),
            engine._combine_kernel(combine, launches[1], stages, in_place=False),
        ]

    for tokens in (1, 7, 16, 63, 64, 65, 128, 129, 255, 256, 1000, 4096):
        for stages in (SEND, RECEIVE):
            assert {id(variant) for variant in needed(tokens, stages)} <= listed[stages], (tokens, stages)


# --- as vLLM reads them ---


def test_layers_across_nodes_are_not_counted():
    """Forwarded rows would count where their tokens come from, not where they are sent."""
    for transport in ("peer_memory", "torch.distributed"):
        op = object.__new__(EpDispatchCombineOp)
        op.config = config_of(
            kernel_type=EpDispatchCombineKernelType.InterNodeV1,
            world_size=4,
            gpu_per_node=2,
            internode_transport=transport,
        )
        with pytest.raises(UnsupportedError, match="EP_A2A_COUNTERS on one node"):
            LayerCounters(2).exchange_of(op, SimpleNamespace(), 1)


def test_reading_without_counters_says_how_to_have_them():
    for managers in ([], [SimpleNamespace(counters=None)]):
        with pytest.raises(StateError, match="Set EP_A2A_COUNTERS to a number of steps"):
            read_counters(managers, {})


def test_layers_are_read_by_their_names_in_the_order_in_which_they_were_built():
    layers, op = LayerCounters(2), SimpleNamespace(config=config_of())
    configs = [SimpleNamespace() for _ in range(3)]
    layers._layers = {number: (moe, op, StepCounters(CPU, 2)) for number, moe in enumerate(configs, 1)}
    names = {id(configs[1]): "second", id(configs[0]): "first", id(layers): "other"}
    manager = SimpleNamespace(counters=layers, rank=3, world_size=4)
    found = read_counters([manager], names)
    assert (found["rank"], found["num_ranks"]) == (3, 4)
    assert [each["layer"] for each in found["layers"]] == ["first", "second", "layer 2"]
    assert {each["num_steps"] for each in found["layers"]} == {0}


def test_the_method_has_the_name_that_the_documents_give():
    assert RPC_METHOD == "ep_a2a_counters"


def test_an_instrumented_op_has_all_that_the_contract_names():
    """What it does not count is the op's."""
    op = EpDispatchCombineOp.__new__(EpDispatchCombineOp)
    op.config, op.device = config_of(), CPU
    instrumented = InstrumentedOp.__new__(InstrumentedOp)
    instrumented.op = op
    assert instrumented.config is op.config
    for name in (each for each in vars(DispatchCombineOp) if not each.startswith("_")):
        assert hasattr(InstrumentedOp, name) or hasattr(type(op), name)
    assert instrumented.warmup_split == op.warmup_split
