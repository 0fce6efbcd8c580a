"""The kernels compiled for GPUs that this machine does not have: what they refuse, how they move rows, what they use.

A first run compiles for half a minute; later ones find Triton's disk cache.
"""

import re
from collections import Counter
from typing import Any

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.errors import PTXASError

from ep_a2a import policy
from ep_a2a.config import LOW_LATENCY_MAX_ROWS, LOW_LATENCY_MAX_TOKENS, EpDispatchCombineConfig
from ep_a2a.kernels.combine_route_kernels import MARKED_ROWS_AT_ONCE, ROWS_AT_ONCE
from ep_a2a.kernels.compiled_kernel import REGISTER_GRANULARITY, CompiledKernel
from ep_a2a.ops.arguments import NO_WISH, RECEIVE, SEND, WHOLE
from ep_a2a.ops.intra_node import LL_PROGRAMS_PER_SM, IntraNodeEngine
from ep_a2a.ops.launches import combine_forms, dispatch_forms
from ep_a2a.policy import FEW_TOKENS, MAX_COUNTED_ALONE, TILE_TOKENS, Phase
from tests.cases.configs import deepseek_v3 as config_of
from tests.offline_compile import compile_kernel, resources, vector_accesses
from tools.instructions import is_spread

AMPERE, ADA, HOPPER = 80, 89, 90
NUM_SMS = 132
REGISTERS_PER_SM = 65536
SHARED_BYTES_PER_SM = 227 * 1024
THREADS_PER_SM = 2048
# Names under which device code loads what a wait looks at.
POLLED = {"answer", "seen", "side", "words"}
# The most ranks of which a flagged dispatch has tokens enough for sparse polls.
SPARSE_RANKS = LOW_LATENCY_MAX_ROWS // (FEW_TOKENS + 1)
SPARSE, WIDE, WIDE_MARKED = {"world_size": SPARSE_RANKS}, {"max_sms": 16}, {"max_sms": 33}
# A cast, a layout, what else the config says, and names of kernels, which take seconds to compile: what dispatch can do
# is compiled at least once, but not every combination of it.
CHOSEN: list[tuple[str, str, dict[str, int], str]] = [
    ("none", "compact", {}, "bulk_dispatch-has_weights bulk_dispatch-has_weights-alone"),
    ("none", "compact", {}, "low_latency_dispatch-has_weights combine-has_weights-spread"),
    ("none", "rank_major", {}, "bulk_dispatch bulk_dispatch-alone bulk_dispatch-has_weights"),
    ("none", "rank_major", {}, "low_latency_dispatch-has_weights"),
    ("fp8_per_1x128", "compact", {}, "bulk_dispatch-cast128-has_weights bulk_dispatch-scales56-has_weights"),
    ("fp8_per_1x128", "compact", {}, "bulk_dispatch-scales56-has_weights-alone"),
    ("fp8_per_1x128", "compact", {}, "low_latency_dispatch-cast128-has_weights"),
    ("fp8_per_1x128", "rank_major", {}, "bulk_dispatch-cast128 bulk_dispatch-cast128-has_weights-alone"),
    ("fp8_per_1x128", "rank_major", {}, "bulk_dispatch-has_weights low_latency_dispatch-cast128-has_weights"),
    ("fp8_per_token", "compact", {}, "bulk_dispatch-cast7168-has_weights"),
    ("fp8_per_token", "compact", {}, "low_latency_dispatch-cast7168-has_weights"),
    ("fp8_per_token", "rank_major", {}, "bulk_dispatch-scales1"),
    ("mxfp8", "rank_major", {}, "bulk_dispatch-cast32-has_weights low_latency_dispatch-cast32-has_weights"),
    ("fp8_static", "rank_major", {}, "bulk_dispatch-cast128-has_weights"),
    ("fp8_static", "rank_major", {}, "low_latency_dispatch-cast128-has_weights"),
    # of few ranks also steps of more tokens are flagged
    ("none", "compact", SPARSE, "low_latency_dispatch-has_weights-sparse"),
    ("none", "rank_major", SPARSE, "low_latency_dispatch-sparse"),
    ("fp8_per_1x128", "compact", SPARSE, "low_latency_dispatch-cast128-has_weights-sparse"),
    ("fp8_per_1x128", "rank_major", SPARSE, "low_latency_dispatch-scales56-sparse"),
    ("fp8_blockwise", "compact", {}, "combine-has_weights-check_indices-quantized-scaled"),
    ("fp8_direct_cast", "rank_major", {}, "combine-quantized"),
    # programs are wider where their number is bounded
    ("fp8_per_1x128", "rank_major", WIDE, "bulk_dispatch-cast128-has_weights"),
    ("fp8_per_1x128", "rank_major", WIDE, "low_latency_dispatch-cast128-has_weights"),
    ("none", "compact", WIDE, "combine-ahead"),
    ("fp8_blockwise", "rank_major", WIDE_MARKED, "combine-quantized-scaled-ahead"),
]


def engine_of(config: EpDispatchCombineConfig, capability: int = HOPPER) -> IntraNodeEngine:
    """The engine of a device of NUM_SMS multiprocessors."""
    engine = IntraNodeEngine(config, torch.zeros(64, config.world_size, dtype=torch.int64), torch.device("cpu"))
    engine.kernels.num_sms = NUM_SMS
    engine.kernels.can_depend = capability >= HOPPER
    return engine


def variants_of(config: EpDispatchCombineConfig, capability: int = HOPPER) -> list[CompiledKernel]:
    """What such a device would be given."""
    return engine_of(config, capability).compiled_kernels()


def kind_of(variant: CompiledKernel) -> str:
    """The phase that a kernel belongs to; of another one its name."""
    name = variant.kernel.__name__.removesuffix("_kernel")
    return {"ll_dispatch": "low_latency_dispatch"}.get(name, name)


def is_dispatch(variant: CompiledKernel) -> bool:
    return kind_of(variant).endswith("dispatch")


def named(variant: CompiledKernel) -> str:
    constants = variant.named_constants
    num_scales = constants.get("SCALE_WIDTH") or (constants.get("HAS_SCALES") and constants["SCALE_WORDS"])
    marks = [f"cast{constants['GROUP']}"] if is_dispatch(variant) and constants["GROUP"] else []
    marks += [f"scales{num_scales}"] if num_scales and not marks else []
    marks += [name for name in ("HAS_WEIGHTS", "CHECK_INDICES") if constants.get(name)]
    marks += [name for name in ("QUANTIZED", "SCALED") if constants.get(f"SENT.{name}")]
    marks += ["sparse"] if constants.get("SPARSE_POLLS") else []
    marks += ["ahead"] if constants.get("READ_AHEAD") else []
    marks += ["alone"] if constants.get("COUNTS_ALONE") else []
    marks += ["spread"] if is_spread(constants) else []
    return "-".join([kind_of(variant), *marks]).lower()


def chosen() -> list[Any]:
    # what follows dispatch does not know about its casts: test_casts_change_dispatch_only
    rows = [*CHOSEN, *(("none", layout, {}, "") for layout in ("compact", "rank_major"))]
    cases: list[Any] = []
    kinds: set[str] = set()
    for quant, layout, changes, names in rows:
        config = config_of(**{"quant_type": quant, "layout": layout, "world_size": 8} | changes)
        variants = {named(variant): variant for variant in variants_of(config)}
        others = [n for n, v in variants.items() if not is_dispatch(v) and not n.endswith("spread")]
        for name in names.split() or others:
            kind = kind_of(variants[name])
            # one variant of each kernel is enough for `make test`
            marks = [pytest.mark.full] if kind in kinds else []
            kinds.add(kind)
            wide = "wide-" if changes in (WIDE, WIDE_MARKED) else ""
            cases.append(pytest.param(config, variants[name], id=f"{quant}-{layout}-{wide}{name}", marks=marks))
    return cases


@pytest.mark.parametrize(("config", "variant"), chosen())
def test_every_variant_compiles_for_hopper(config, variant, tmp_path):
    asm = compile_kernel(variant, HOPPER)
    loads, stores = vector_accesses(asm["ptx"])
    if kind_of(variant) != "count_local_experts":
        assert loads > 0
        assert stores > 0
    _check_polled_once(config, variant, asm["ttgir"])
    assert tiles_handed_on(asm["ttgir"]) == []
    used = resources(asm["cubin"], tmp_path)
    assert used["LOCAL"] == 0
    registers = -(-used["REG"] // REGISTER_GRANULARITY) * REGISTER_GRANULARITY
    assert registers <= (variant.max_registers or registers)
    # launches are cut to the programs that registers leave room for: tests/unit/test_policy.py
    threads = 32 * variant.num_warps
    programs_per_sm = min(REGISTERS_PER_SM // (used["REG"] * threads), THREADS_PER_SM // threads)
    assert programs_per_sm > 0
    assert used["SHARED"] * programs_per_sm <= SHARED_BYTES_PER_SM


def tiles_handed_on(ttgir: str) -> list[str]:
    """Tiles that a loop hands from one turn to another at another place.

    Such a tile is copied to other registers at the end of each turn. If it is still being read, that waits for it, and
    it has been read ahead in vain.
    """
    found = []
    for block in re.finditer(r"^( *)\^bb0\((.*)\):$", ttgir, re.MULTILINE):
        places = re.findall(r"(%[\w.]+): (tensor<\w+x\w+x\w+, [^>]*>)?", block[2])
        names = [name for name, _ in places]
        handed = re.search(rf"^{block[1]}  scf\.yield ([^:]*) :", ttgir[block.end() :], re.MULTILINE)
        for place, name in enumerate(handed[1].split(", ") if handed else ()):
            if (name in names) and names.index(name) != place and places[names.index(name)][1]:
                found.append(name)
    return found


def _check_polled_once(config: EpDispatchCombineConfig, variant: CompiledKernel, ttgir: str) -> None:
    """What is polled and then used is loaded once: of two copies one could be checked and the other used.

    The compiler does load small vectors several times, one for each layout that it wants them in. What is loaded once
    more after a verdict (counts of ranks whose lines have all come) is not among the names here.
    """
    polled = Counter(
        (match.group(1), re.findall(r"loc\((#loc\d+)\)", line)[-1])
        for line in ttgir.splitlines()
        if "isVolatile = true" in line and (match := re.match(r"\s*%(\w+?)(_\d+)? = tt.load", line))
    )
    polled = Counter({at: count for at, count in polled.items() if at[0] in POLLED})
    constants, kind = variant.named_constants, kind_of(variant)
    most_rows = MARKED_ROWS_AT_ONCE if constants.get("MARKED") and constants["READ_AHEAD"] else ROWS_AT_ONCE
    rows = min(most_rows.value, config.world_size, config.topk)
    assert all(count in (1, rows, config.world_size) for count in polled.values()), polled
    # the names are the code's: a name that is gone would check nothing
    expected = {
        "bulk_dispatch": {"answer"} | ({"seen"} if constants.get("COMPACT") else set()),
        "low_latency_dispatch": {"answer", "seen", "side", "words"},
        "combine": {"answer"} | ({"seen"} if constants.get("MARKED") else set()),
    }.get(kind, set())
    if kind == "bulk_dispatch" and not constants["COUNTS_ALONE"]:
        expected |= {"words"}
    assert {name for name, _ in polled} >= expected, (kind, polled)


@pytest.mark.full
def test_sparse_polls_read_as_the_others_do():
    """tests/order has the loads of those that are not sparse."""
    variants = {named(variant): variant for variant in variants_of(config_of(**SPARSE))}
    texts = [compile_kernel(variants[f"low_latency_dispatch{way}"])["ttgir"] for way in ("", "-sparse")]
    whole, sparse = (text.count("isVolatile = true") for text in texts)
    assert whole == sparse > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"data_type": torch.float32},
        {"data_type": torch.float32, "max_sms": 16},
        {"data_type": torch.float32, "max_sms": 33, "on_rank_loss": "mask", "layout": "rank_major"},
        {"world_size": 4, "on_rank_loss": "mask", "layout": "rank_major", "compiled_calls": "serving"},
    ],
    ids=["float32", "float32-arrived", "float32-marked-masks", "masks"],
)
def test_a_combine_puts_nothing_on_the_stack(changes, tmp_path):
    combines = [variant for variant in variants_of(config_of(**changes)) if kind_of(variant) == "combine"]
    assert combines
    for variant in combines:
        assert resources(compile_kernel(variant)["cubin"], tmp_path)["STACK"] == 0


@pytest.mark.parametrize(("world_size", "num_beside"), [(2, 4), (4, 3)])
def test_registers_leave_room_for_as_many_programs_as_launches_ask_for(world_size, num_beside):
    """A program of a low-latency dispatch leaves half of a multiprocessor; a spread combine fits into the other."""
    seen = set()
    for variant in variants_of(config_of(world_size=world_size)):
        kind, constants, threads = kind_of(variant), variant.named_constants, 32 * variant.num_warps
        if kind not in ("low_latency_dispatch", "combine", "bulk_dispatch"):
            assert variant.max_registers is None
            continue
        registers = variant.max_registers * threads
        seen.add((kind, is_spread(constants)))
        if kind == "low_latency_dispatch":
            assert registers * LL_PROGRAMS_PER_SM <= REGISTERS_PER_SM
        elif is_spread(constants):
            assert registers * num_beside <= REGISTERS_PER_SM // LL_PROGRAMS_PER_SM
        else:
            assert registers * (policy.THREADS_PER_SM[Phase(kind)] // threads) <= REGISTERS_PER_SM
    assert seen == {("low_latency_dispatch", False), ("combine", True), ("combine", False), ("bulk_dispatch", False)}


def test_one_thread_reads_each_word_that_a_program_waits_for():
    """Where a reduction over lanes is one verdict for all threads, lanes must be at least the threads of a program."""
    manual = [{"launch": "manual", "warp_num_per_block": num_warps} for num_warps in (1, 4, 16, 32)]
    for changes in (*manual, {}, {"max_sms": 20}):
        for world_size, hidden_dim in ((2, 8), (8, 7168)):
            config = config_of(hidden_dim=hidden_dim, world_size=world_size, num_experts_per_token=2, **changes)
            for variant in variants_of(config):
                constants, kind = variant.named_constants, kind_of(variant)
                lanes = {
                    "bulk_dispatch": ("COUNT_LANES", "POISON_LANES"),
                    "low_latency_dispatch": ("COUNT_LANES", "SIDE_LANES", "BLOCK_WORDS"),
                    "combine": ("WEIGHTS.GROUPS_LANES",),
                }.get(kind, ())
                assert all(constants[name] >= 32 * variant.num_warps for name in lanes), (kind, changes)
                if kind == "combine":
                    assert constants["ADDED.GROUPS_LANES"] >= 32 * variant.num_warps
                if kind == "bulk_dispatch":
                    assert constants["PROGRAM_LANES"] * constants["WORLD_LANES"] >= 32 * variant.num_warps
                if kind == "low_latency_dispatch":
                    # behind the words beside a row, a lane reads the source's count
                    assert constants["SIDE_LANES"] > constants["SCALE_WORDS"] + 2 * constants["TOPK"] + 1


def test_casts_change_dispatch_only():
    """Why the other kernels are compiled for one quant type: they are the same with all."""

    def others(quant: str) -> list[Any]:
        return [variant.key for variant in variants_of(config_of(quant_type=quant)) if not is_dispatch(variant)]

    for quant in ("fp8_per_1x128", "fp8_per_token", "mxfp8", "fp8_static"):
        assert others(quant) == others("none")


def test_a_scale_of_a_whole_row_takes_the_registers_of_all_warps():
    """No tiles of tokens then, which the warps of a bounded launch would divide among themselves."""
    bulk = [v.named_constants for v in variants_of(config_of(quant_type="fp8_per_token", max_sms=20)) if is_dispatch(v)]
    found = {(each["GROUP"], each["TOKENS"]) for each in bulk if "TOKENS" in each}
    assert found == {(7168, 1), (0, TILE_TOKENS)}


@settings(max_examples=20, derandomize=True, database=None)
@given(
    most=st.integers(1, 600) | st.integers(MAX_COUNTED_ALONE - 1, MAX_COUNTED_ALONE + 60),
    flagged=st.sampled_from([0, 1, 30, 128]),
    max_sms=st.sampled_from([0, 8, 24]),
    quant_type=st.sampled_from(["none", "fp8_per_token", "fp8_blockwise"]),
    world_size=st.sampled_from([2, 8, 16]),
    layout=st.sampled_from(["rank_major", "compact"]),
    stages=st.sampled_from([WHOLE, SEND, RECEIVE]),
)
def test_kernels_are_compiled_for_all_sizes_of_steps(most, flagged, max_sms, quant_type, world_size, layout, stages):
    """Also of steps that are captured before any like them has run; and no more: a kernel takes seconds to compile."""
    config = config_of(
        max_num_inp_token_per_rank=most,
        flagged_max_tokens=flagged,
        max_sms=max_sms,
        quant_type=quant_type,
        world_size=world_size,
        layout=layout,
        compiled_calls="serving",
    )
    engine = engine_of(config)
    listed = engine.compiled_kernels(stages)
    needed = set()
    for size in range(1, most + 1):
        (dispatch,), (combine,) = dispatch_forms(config, size), combine_forms(config, size)
        for launch in (
            *engine._dispatch_launches(dispatch, stages, NO_WISH),
            *engine._combine_launches(combine, stages, NO_WISH),
        ):
            needed.add(launch.kernel.key)
    assert {variant.key for variant in listed} == needed
    assert len(listed) == len(needed)


def _way_of(variant: CompiledKernel) -> str:
    """Which way of dispatch it is."""
    constants = variant.named_constants
    if kind_of(variant) == "bulk_dispatch":
        return "alone" if constants["COUNTS_ALONE"] else "many"
    return "sparse" if constants["SPARSE_POLLS"] else "flagged"


@pytest.mark.parametrize(
    "tokens", [1, LOW_LATENCY_MAX_TOKENS, 255, 256, MAX_COUNTED_ALONE, MAX_COUNTED_ALONE + 1, 65535, 65536, 2**24 - 1]
)
@pytest.mark.parametrize("flagged", [0, LOW_LATENCY_MAX_TOKENS])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_few_tokens_have_a_lane_each_and_many_have_programs_that_tell(tokens, flagged, world_size):
    config = config_of(max_num_inp_token_per_rank=tokens, flagged_max_tokens=flagged, world_size=world_size)
    dispatches = [variant for variant in variants_of(config) if is_dispatch(variant)]
    for variant in dispatches:
        if kind_of(variant) == "low_latency_dispatch":
            assert config.low_latency_tokens <= variant.named_constants["TOKEN_LANES"]
    assert ("many" in map(_way_of, dispatches)) == (tokens > MAX_COUNTED_ALONE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "capability"),
    [
        # masks must not spoil the vectors: gpt-oss has 2880 elements in a row
        ({"hidden_dim": 2880, "world_size": 2}, HOPPER),
        ({"hidden_dim": 3080, "world_size": 2}, HOPPER),
        # which has no fp8 conversion: everything but the fused cast
        ({"hidden_dim": 2048, "world_size": 16, "num_experts_per_rank": 4}, AMPERE),
    ],
    ids=["2880", "3080", "older"],
)
def test_rows_move_in_vectors(changes, capability):
    """Rows that are no power of two; many ranks on compute capability 8.0."""
    config, seen = config_of(layout="rank_major", num_experts_per_token=2, **changes), set()
    for variant in variants_of(config, capability):
        if variant.named_constants.get("HAS_WEIGHTS") is not True and not variant.named_constants.get("CHECK_INDICES"):
            seen.add(kind_of(variant))
            ptx = compile_kernel(variant, capability)["ptx"]
            assert f".target sm_{capability}" in ptx
            if kind_of(variant) != "count_local_experts":
                assert min(vector_accesses(ptx)) > 0, kind_of(variant)
    assert seen == {"bulk_dispatch", "low_latency_dispatch", "combine", "count_local_experts"}


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_every_dtype_compiles_for_an_older_gpu(dtype):
    config = config_of(
        data_type=dtype,
        world_size=3,
        hidden_dim=144,
        num_experts_per_token=3,
        num_experts_per_rank=5,
        scale_dim=5,
        scale_type_size=1,
    )
    for variant in variants_of(config, AMPERE):
        constants = variant.named_constants
        has_scales = constants.get("SCALE_WIDTH") or constants.get("HAS_SCALES")
        if not is_dispatch(variant) or (constants["HAS_WEIGHTS"] and has_scales):
            assert ".target sm_80" in compile_kernel(variant, AMPERE)["ptx"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["bulk_dispatch", "low_latency_dispatch", "combine"])
def test_casts_need_a_newer_gpu(kind):
    """What docs/memory-model.md says of older GPUs; the integer conversion is the interpreter's only."""
    quant = "fp8_direct_cast" if kind == "combine" else "fp8_per_token"
    config = config_of(quant_type=quant, hidden_dim=256, world_size=2, num_experts_per_token=2)
    variant = next(each for each in variants_of(config, AMPERE) if kind_of(each) == kind)
    assert "e4m3x2" in compile_kernel(variant, ADA)["ptx"]
    with pytest.raises((triton.compiler.errors.CompilationError, PTXASError)) as caught:
        compile_kernel(variant, AMPERE)
    cause: BaseException = caught.value
    while cause.__cause__ is not None and not isinstance(cause, PTXASError):
        cause = cause.__cause__
    # Triton's own conversion, or the instructions of combine
    assert re.search("fp8e4nv|e4m3x2.* requires .target sm_89", str(cause))


def test_a_bound_on_multiprocessors_is_compiled_once(monkeypatch):
    """Engines bound and free the launches of an op in every step."""
    engine = engine_of(config_of())
    kernels, compiled = engine.kernels, []
    kernels.interpreted = False
    monkeypatch.setattr("ep_a2a.ops.engine.compile_all", lambda *_: compiled.append(kernels.max_sms))
    engine.compile()
    for bound in (20, NUM_SMS, 20, 0):
        engine.limit_sms(bound)
        kernels.plans[bound] = "a plan"
    assert compiled == [0, 20]
    for shares in (True, False, True):
        engine.limit_sms(0, shares_sm=shares)
    assert compiled == [0, 20, 0]
    assert not kernels.plans
    engine.limit_sms(0, "share of the GPU")
    assert kernels.shares_sm, "another bound leaves it"
    small = [kernel for kernel in engine.compiled_kernels() if kernel.shares_sm]
    assert {kernel.name for kernel in small} == {"bulk_dispatch", "combine"}
    assert {(kernel.num_warps, kernel.max_registers) for kernel in small} == {(4, 96)}
    engine.limit_sms(0, shares_sm=False)
    compiled.pop()
    assert set(kernels.plans) == {NUM_SMS, 0}, "each bound has plans of its own, and a whole GPU is no bound"
    engine.record_spans()
    engine.limit_sms(20)
    assert compiled == [0, 20, 0, 20], "other kernels are launched from now on"
    assert not kernels.plans
