"""Tuned tables: which entry a launch takes, what the policy makes of it, and what is compiled for it."""

import functools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ep_a2a
from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.ops.intra_node import IntraNodeEngine
from ep_a2a.tuning import tables as tuning
from ep_a2a.tuning.policy import (
    FLAG_PROGRAMS,
    MAX_COUNTED_ALONE,
    NEVER_SHARED,
    THREADS_PER_SM,
    Launch,
    Phase,
    choose_launch,
    dispatch_phase,
    launch_shapes,
)
from ep_a2a.tuning.tables import Evidence, ShapeKey, Table, TableEntry, TunedLaunch, TunedTables, lookup
from tests.cases.configs import deepseek_v3

PROJECT = Path(ep_a2a.__file__).parent.parent
H200_SMS = 132
FP8_ROW_BYTES, BF16_ROW_BYTES = 7168 + 56 * 4, 2 * 7168
EVIDENCE = Evidence(10.0, 1.0, 1, "a GPU", {"torch": "2", "triton": "3"}, "2026-11-21")
COMBINE = TunedLaunch(8, 0, 16, 100, 2048, 512, 50)
DISPATCH = TunedLaunch(16, 20)


config_of = functools.partial(
    deepseek_v3, world_size=4, num_experts_per_rank=64, max_token_type_size=2, quant_type="fp8_per_1x128"
)


def entry(size: int, launch: TunedLaunch = COMBINE, **changes: Any) -> TableEntry:
    key = {"hidden_dim": 7168, "topk": 8, "cast": "bfloat16", "max_num_tokens": size} | changes
    return TableEntry(ShapeKey(**key), launch, EVIDENCE, "a.json")


def key(size: int, **changes: Any) -> ShapeKey:
    return entry(size, **changes).key


def found(table: Table, wanted: ShapeKey) -> tuple[int, str]:
    answer = lookup(table, wanted)
    return answer.entry.key.max_num_tokens, answer.reason


# --- lookup ---

TABLE = tuple(entry(size) for size in (1, 16, 32, 128, 512))


@pytest.mark.parametrize("size", [1, 16, 32, 128, 512])
def test_the_exact_entry_comes_first(size):
    assert found(TABLE, key(size)) == (size, "tuned table a.json, exact")


@pytest.mark.parametrize(
    ("size", "nearest"),
    # by ratio, not by difference: 60 is nearer to 32; of two equally near ones (64, 256) the larger
    [(2, 1), (8, 16), (22, 16), (23, 32), (60, 32), (64, 128), (256, 512), (255, 128), (1024, 512)],
)
def test_otherwise_the_nearest_size_counts(size, nearest):
    assert found(TABLE, key(size)) == (nearest, f"tuned table a.json, nearest: {nearest}")


@pytest.mark.parametrize(
    "wanted",
    [
        *map(key, (3, 4, 7, 1025, 1 << 20)),
        key(16, cast="float16"),
        key(16, hidden_dim=1024),
        key(16, hidden_dim=1 << 15),
    ],
)
def test_what_is_far_or_of_another_cast_says_nothing(wanted):
    assert lookup(TABLE, wanted) is None
    assert lookup((), wanted) is None


def test_the_same_hidden_dim_counts_before_the_nearest_size():
    table = (entry(16, hidden_dim=4096), entry(32), entry(16, hidden_dim=6144))
    assert found(table, key(16))[0] == 32
    wanted = key(16, hidden_dim=5120)
    assert found(table, wanted) == (16, "tuned table a.json, nearest: 16 of hidden_dim 6144")
    # nothing near enough of the same hidden_dim: the next one's
    assert found(table, key(8)) == (16, "tuned table a.json, nearest: 16 of hidden_dim 6144")


def test_the_same_topk_counts_at_equal_distance():
    table = (entry(16, topk=2), entry(16, topk=4), entry(16, topk=6))
    assert lookup(table, key(16, topk=4)) == (table[1], "tuned table a.json, exact")
    assert found(table, key(16)) == (16, "tuned table a.json, nearest: 16 of topk 2")


def test_keys_are_what_all_ranks_agree_on():
    config = config_of()
    assert tuning.shape_key(config, "bulk_dispatch", 64) == ShapeKey(7168, 8, "fp8_per_1x128", 64)
    assert tuning.shape_key(config, "combine", 64) == ShapeKey(7168, 8, "bfloat16", 64)
    plain = config_of(quant_type="none", data_type=torch.float16)
    assert tuning.shape_key(plain, "low_latency_dispatch", 1) == ShapeKey(7168, 8, "float16", 1)
    both = config_of(quant_type="fp8_blockwise", dispatch_quant_type="fp8_per_token")
    assert tuning.shape_key(both, "bulk_dispatch", 1).cast == "fp8_per_token"
    assert tuning.shape_key(both, "combine", 1).cast == "fp8_blockwise"
    other = config_of(rank=3, timeout_secs=1.0)
    assert tuning.shape_key(other, "combine", 64) == tuning.shape_key(config, "combine", 64)


# --- launches ---


def tables_of(*entries: TableEntry, phase: str = "combine") -> TunedTables:
    return TunedTables({phase: entries})


def chosen(phase: Phase, num_tokens: int, size: int, tables: TunedTables | None, **options: Any) -> Launch:
    changes = options.pop("config", {})
    return choose_launch(config_of(**changes), phase, num_tokens, size, H200_SMS, tables=tables, **options)


def test_tuned_numbers_are_taken():
    launch = chosen(Phase.COMBINE, 512, 512, tables_of(entry(512)))
    num_programs = FLAG_PROGRAMS[Phase.COMBINE] + 16 + 100
    assert launch == Launch(num_programs, 8, "tuned table a.json, exact", 16, 100, 2048, 512, 50)
    dispatch = tables_of(entry(512, DISPATCH, cast="fp8_per_1x128"), phase="bulk_dispatch")
    assert chosen(Phase.BULK_DISPATCH, 512, 512, dispatch) == Launch(20, 16, "tuned table a.json, exact", send_rows=0)


def test_launches_without_an_entry_are_the_analytic_ones():
    for tables in (TunedTables(), tables_of(entry(512), phase="bulk_dispatch"), tables_of(entry(512, cast="float32"))):
        for phase in Phase:
            assert chosen(phase, 512, 512, tables) == chosen(phase, 512, 512, None)
            assert chosen(phase, 512, 512, tables).reason == "analytic"


@pytest.mark.parametrize("own", [0, 1, 3])
def test_programs_shrink_with_the_work(own):
    many = TunedLaunch(4, 0, 264, 264, 8192, 1024)
    combine = chosen(Phase.COMBINE, own, 4, tables_of(entry(4, many)))
    assert (combine.num_senders, combine.num_receivers) == (4 * 4, max(1, own * 7))
    tables = tables_of(entry(4, many, cast="fp8_per_1x128"), phase="low_latency_dispatch")
    flagged = chosen(Phase.LOW_LATENCY_DISPATCH, own, 4, tables)
    assert (flagged.num_senders, flagged.num_receivers) == (max(1, own), 4 * 4)
    # own rows travel in layout compact only
    by_rank = chosen(Phase.LOW_LATENCY_DISPATCH, own, 4, tables, config={"layout": "rank_major"})
    assert (by_rank.num_senders, by_rank.num_receivers) == (max(1, own), 3 * 4)
    assert (
        by_rank.num_programs == FLAG_PROGRAMS[Phase.LOW_LATENCY_DISPATCH] + by_rank.num_senders + by_rank.num_receivers
    )
    tables = tables_of(entry(4, DISPATCH, cast="fp8_per_1x128"), phase="bulk_dispatch")
    assert chosen(Phase.BULK_DISPATCH, own, 4, tables).num_programs == max(1, own)


def test_zero_means_a_program_for_each_unit_of_work():
    tables = tables_of(entry(16, TunedLaunch(4), cast="fp8_per_1x128"), phase="low_latency_dispatch")
    launch = chosen(Phase.LOW_LATENCY_DISPATCH, 20, 20, tables)
    assert (launch.num_senders, launch.num_receivers, launch.reason) == (20, 80, "tuned table a.json, nearest: 16")


def test_numbers_tuned_for_a_bound_are_taken_with_that_bound_only():
    tuned = entry(4096, TunedLaunch(8, num_senders=9, send_rows=2), max_sms=24)
    untuned = {bound: chosen(Phase.COMBINE, 4096, 4096, None, max_sms=bound) for bound in (0, 16, 24)}
    for bound in (0, 16):
        assert chosen(Phase.COMBINE, 4096, 4096, tables_of(tuned), max_sms=bound) == untuned[bound]
    launch = chosen(Phase.COMBINE, 4096, 4096, tables_of(tuned), max_sms=24)
    assert (launch.num_warps, launch.num_senders, launch.send_rows) == (8, 9, 2)
    assert launch.reason == "tuned table a.json, exact"
    assert launch.num_programs == untuned[24].num_programs
    # the nearest size, and 0 for the number that follows from the bound
    own = entry(4096, TunedLaunch(16, send_rows=4), max_sms=24)
    launch = chosen(Phase.COMBINE, 3000, 3000, tables_of(own), max_sms=24)
    assert replace(launch, reason="") == replace(chosen(Phase.COMBINE, 3000, 3000, None, max_sms=24), reason="")
    # what the caller says counts
    assert chosen(Phase.COMBINE, 4096, 4096, tables_of(tuned), max_sms=24, block_num=20).reason == "caller"


def test_tuned_numbers_are_wishes():
    """Programs of a launch wait for each other's ranks, so all must fit: also with fewer multiprocessors."""
    tables = tables_of(entry(4096, TunedLaunch(4, 0, 64, 594, 8192, 1024)))
    for max_sms in (1, 20, H200_SMS):
        launch = chosen(Phase.COMBINE, 4096, 4096, tables, config={"max_sms": max_sms})
        flag_programs, fits = FLAG_PROGRAMS[Phase.COMBINE], THREADS_PER_SM[Phase.COMBINE] // (32 * 4)
        assert launch.num_programs <= (max(flag_programs + 2, max_sms) if max_sms < H200_SMS else fits * H200_SMS)
        without_role = flag_programs if launch.shared_from == NEVER_SHARED else 0
        assert launch.num_programs == without_role + launch.num_senders + launch.num_receivers
    wide = chosen(Phase.COMBINE, 4096, 4096, tables_of(entry(4096, replace(COMBINE, num_warps=32, num_senders=4000))))
    assert wide.num_programs <= H200_SMS


def test_the_callers_and_the_configs_numbers_come_before_tuned_ones():
    tables = tables_of(entry(512))
    launch = chosen(Phase.COMBINE, 512, 512, tables, block_num=20)
    assert (launch.num_programs, launch.num_warps, launch.reason) == (20, 8, "caller")
    assert chosen(Phase.COMBINE, 512, 512, tables, warp_per_block=2).num_warps == 2
    manual = {"launch": "manual", "block_num": 30, "warp_num_per_block": 4}
    launch = chosen(Phase.COMBINE, 512, 512, tables, config=manual)
    assert launch == chosen(Phase.COMBINE, 512, 512, None, config=manual)


def test_the_source_of_a_launch_is_logged_once(caplog):
    # a shape that no other test logs
    config = config_of(hidden_dim=7184, quant_type="none")
    engine = engine_of(config)
    engine.use_tables(tables_of(entry(512, hidden_dim=7184)))
    with caplog.at_level(logging.INFO, logger="ep_a2a.tuning.tables"):
        for size in (512, 512, 300):
            engine.launch_of(Phase.COMBINE, size, size)
        engine.launch_of(Phase.COMBINE, 7, 512)
        engine.launch_of(Phase.BULK_DISPATCH, 512, 512)
        engine.use_tables(tables_of(entry(512, hidden_dim=7184)))
        engine.launch_of(Phase.COMBINE, 512, 512)
    assert [record.getMessage() for record in caplog.records] == [
        "combine of at most 512 tokens per rank: launch numbers are tuned table a.json, exact",
        "combine of at most 300 tokens per rank: launch numbers are tuned table a.json, nearest: 512",
        "bulk_dispatch of at most 512 tokens per rank: launch numbers are analytic",
    ]


# --- what is compiled at construction ---


def engine_of(config: EpDispatchCombineConfig) -> IntraNodeEngine:
    """As on a device of H200_SMS multiprocessors."""
    engine = IntraNodeEngine(config, torch.zeros(64, config.world_size, dtype=torch.int64), torch.device("cpu"))
    engine.kernels.num_sms = H200_SMS
    return engine


def shape(phase: Phase, size: int, launch: Launch) -> tuple[Any, ...]:
    """What kernels are compiled for; a program of a dispatch counts alone where tokens are few enough."""
    alone = phase is Phase.BULK_DISPATCH and size <= MAX_COUNTED_ALONE
    return (
        phase,
        launch.num_warps,
        launch.send_elements,
        launch.add_elements,
        launch.sparse_polls,
        launch.dependent,
        alone,
    )


LAUNCHES = st.builds(
    TunedLaunch,
    num_warps=st.sampled_from([1, 2, 4, 8]),
    num_programs=st.integers(0, 300),
    num_senders=st.integers(0, 300),
    num_receivers=st.integers(0, 300),
    send_elements=st.sampled_from([128, 1024, 8192]),
    add_elements=st.sampled_from([128, 1024]),
)


@settings(max_examples=25, derandomize=True, database=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 1200), st.sampled_from([4096, 7168, 2048]), LAUNCHES), max_size=6),
    most=st.integers(1, 600) | st.integers(MAX_COUNTED_ALONE - 1, MAX_COUNTED_ALONE + 60),
    flagged=st.sampled_from([0, 1, 30, 128]),
)
def test_every_shape_that_a_step_can_have_is_listed(sizes, most, flagged):
    entries = {key(size, hidden_dim=hidden): entry(size, launch, hidden_dim=hidden) for size, hidden, launch in sizes}
    tables = TunedTables({phase.value: tuple(entries.values()) for phase in Phase})
    config = config_of(max_num_inp_token_per_rank=most, flagged_max_tokens=flagged, quant_type="none")
    listed = launch_shapes(config, H200_SMS, tables)
    needed = {
        shape(phase, size, choose_launch(config, phase, size, size, H200_SMS, tables=tables))
        for size in range(1, most + 1)
        for phase in (dispatch_phase(config, size), Phase.COMBINE)
    }
    assert {shape(phase, size, launch) for phase, size, launch in listed} == needed
    # each once: a kernel takes seconds to compile
    assert len(listed) == len(needed)


def test_the_ops_variants_are_those_of_the_tables():
    config = config_of(quant_type="none")
    engine = engine_of(config)
    engine.use_tables(tables_of(entry(512, COMBINE), entry(128, TunedLaunch(2, 0, 8, 8, 4096, 256))))
    engine.kernels.num_sms = H200_SMS
    combines = {
        v.num_warps: v.named_constants for v, _ in engine.compiled_kernels() if v.kernel.__name__ == "combine_kernel"
    }
    assert set(combines) == {2, 4, 8}
    # words of two elements
    words = {
        (warps, name): found[f"{name}.GROUPS_LANES"] * found[f"{name}.GROUP"]
        for warps, found in combines.items()
        for name in ("SENT", "ADDED")
    }
    assert (words[2, "SENT"], words[2, "ADDED"]) == (2048, 128)
    assert (words[8, "SENT"], words[8, "ADDED"]) == (1024, 256)
