"""Kernels between nodes compile for GPUs, without spilling, and move rows in vectors; and what a ring's shape is."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_a2a.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from ep_a2a.errors import ConfigError
from ep_a2a.kernels.ring_shape import HEADER_WORDS, Rings
from ep_a2a.ops.arguments import NO_WISH, WHOLE
from ep_a2a.ops.launches import combine_forms, dispatch_forms
from ep_a2a.ops.rings import RingEngine
from ep_a2a.ops.staged import StagedEngine
from tests.cases.configs import deepseek_v3
from tests.markers import first_is_quick
from tests.offline_compile import check_moves

NUM_SMS = 132
CAST = {"quant_type": "fp8_per_1x128", "layout": "compact"}
FORMS = {
    "bf16": {},
    "cast-few-compact": CAST | {"kernel_type": EpDispatchCombineKernelType.InterNodeV1LL},
    "combine-cast": {"quant_type": "fp8_blockwise"},
    "scales": {"data_type": torch.float8_e4m3fn, "scale_dim": 56, "scale_type_size": 4},
}
STAGED_FORMS = FORMS | {"cast-few-compact": CAST, "fp32": {"data_type": torch.float32}}


# on 2 nodes of 8
config_of = functools.partial(
    deepseek_v3,
    world_size=16,
    num_experts_per_rank=16,
    gpu_per_node=8,
    layout="rank_major",
    kernel_type=EpDispatchCombineKernelType.InterNodeV1,
    compiled_calls="serving",
)


@pytest.mark.parametrize("changes", first_is_quick(FORMS.items()))
def test_they_compile(changes: dict[str, Any], tmp_path: Path) -> None:
    moving = {"exchange_kernel", "offer_results_kernel", "return_kernel"}
    check_moves(engine_of(config_of(**changes)).compiled_kernels(), moving, tmp_path)


@pytest.mark.parametrize("changes", first_is_quick(STAGED_FORMS.items()))
def test_kernels_around_an_exchange_of_the_host_compile(changes: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(world_size=32, num_experts_per_rank=8, internode_transport="torch.distributed", **changes)
    table = torch.zeros(64, config.world_size, dtype=torch.int64)
    # an arena, and memory bound to it, of which no launch is made
    arena: Any = SimpleNamespace(device=table.device, rendezvous=None, table=table)
    engine = StagedEngine(config, arena, arena, arena)
    engine.kernels.num_sms = NUM_SMS
    moving = {"pack_kernel", "forward_kernel", "pack_sums_kernel", "sum_nodes_kernel"}
    # others are of rings, or of an op inside a node
    wanted = {*moving, "pass_on_kernel", "post_failure_kernel"}
    check_moves((each for each in engine.compiled_kernels() if each.kernel.__name__ in wanted), moving, tmp_path)


def test_shape_of_rings() -> None:
    rings = Rings.of(config_of())
    assert (rings.num_nodes, rings.gpus_per_node, rings.num_channels, rings.num_slots) == (2, 8, 256, 2)
    assert (rings.chunk_tokens, rings.num_chunks) == (8, 512)
    # a row of bf16, 8 ids, 8 weights, a row number at each of 8 ranks, the token; to a multiple of 16 bytes
    assert rings.line_words == 3584 + 28
    assert rings.slot_words == HEADER_WORDS + 8 * rings.line_words
    assert rings.back_line_words == 3584 + 8


def test_rings_that_hold_a_step_have_one_chunk_per_channel() -> None:
    for most in (1, 5, 256, 257, 400, 4096):
        config = config_of(kernel_type=EpDispatchCombineKernelType.InterNodeV1LL, max_num_inp_token_per_rank=most)
        rings = Rings.of(config)
        assert rings.num_slots == 1
        assert rings.num_chunks == rings.num_channels <= 256
        assert rings.num_chunks * rings.chunk_tokens >= most


def test_impossible_rings() -> None:
    with pytest.raises(ConfigError, match="gpu_per_node to divide world_size 16; got 3"):
        Rings.of(config_of(gpu_per_node=3))
    with pytest.raises(ConfigError, match="ring_chunks to be a power of two; got 3"):
        Rings.of(config_of(ring_chunks=3))


def test_few_tokens_need_few_channels() -> None:
    rings = Rings.of(config_of(max_num_inp_token_per_rank=100))
    assert (rings.num_channels, rings.num_chunks) == (13, 13)


def test_channels_are_a_launch_number() -> None:
    assert Rings.of(config_of(rdma_block_num=16)).num_channels == 256
    assert Rings.of(config_of(rdma_block_num=16, launch="manual")).num_channels == 16


def engine_of(config: EpDispatchCombineConfig) -> RingEngine:
    engine = RingEngine(config, torch.zeros(64, config.world_size, dtype=torch.int64), torch.device("cpu"))
    engine.kernels.num_sms = NUM_SMS
    return engine


@pytest.mark.parametrize(("max_sms", "channels", "offering"), [(0, 256, 4 * NUM_SMS), (24, 24, 24)])
def test_a_bound_on_multiprocessors_bounds_programs(max_sms: int, channels: int, offering: int) -> None:
    config = config_of(max_sms=max_sms)
    engine, most = engine_of(config), config.max_num_inp_token_per_rank
    (dispatch,), (combine,) = dispatch_forms(config, most), combine_forms(config, most)
    launches = [
        *engine._dispatch_launches(dispatch, WHOLE, NO_WISH),
        *engine._combine_launches(combine, WHOLE, NO_WISH),
    ]
    assert {launch.kernel.name: launch.num_programs for launch in launches} == {
        "number_rows": min(NUM_SMS, channels),
        "exchange": channels,
        "bulk_dispatch": 1,
        "offer_results": offering,
        "return": channels,
    }


def test_manual_launches_take_the_configs_number_of_programs() -> None:
    config = config_of(launch="manual", block_num=7)
    (dispatch,) = dispatch_forms(config, 4096)
    for wish, number in ((NO_WISH, 7), (NO_WISH._replace(block_num=9), 9)):
        numbering, *_ = engine_of(config)._dispatch_launches(dispatch, WHOLE, wish)
        assert (numbering.kernel.name, numbering.num_programs) == ("number_rows", number)


def test_without_rings_there_is_no_memory_for_them() -> None:
    rings = Rings.of(config_of(kernel_type=EpDispatchCombineKernelType.InterNode))
    assert (rings.num_nodes, rings.slot_words, rings.back_slot_words) == (0, 0, 0)
