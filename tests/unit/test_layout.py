"""Byte layout of an op's memory: pure arithmetic, also for worlds that no machine here has."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from ep_a2a.config import EpDispatchCombineConfig, num_owned_experts
from ep_a2a.kernels.layout import OpLayout, Region, padded
from tests.cases.configs import deepseek_v3
from tests.cases.tables import read_table

WORLD_SIZES = (1, 2, 3, 8, 72)
BLOCKS = ("control", "dispatch", "combine", "local", "result", "expert")
VARIANTS = read_table("configs")["layouts"]


def config_of(world_size: int, **changes: Any) -> EpDispatchCombineConfig:
    sizes = {"hidden_dim": 256, "max_num_inp_token_per_rank": 17, "num_experts_per_rank": 3, "num_experts_per_token": 5}
    return deepseek_v3(world_size=world_size, **sizes | changes)


def every_config() -> list[Any]:
    return [
        pytest.param(config_of(world_size, **changes), id=f"W{world_size}-{name}")
        for world_size in WORLD_SIZES
        for name, changes in VARIANTS.items()
    ]


def fields_of(layout: OpLayout) -> list[Any]:
    return [field for name in BLOCKS for field in getattr(layout, name).fields]


@pytest.mark.parametrize("config", every_config())
def test_every_region_has_one_place(config):
    found = Counter(field.region for field in fields_of(OpLayout.of(config)))
    # the host polls the error record, so it is not part of the op's blocks; ELEMENTS are numbers in the table itself
    assert found == Counter(set(Region) - {Region.ERROR_RECORD, Region.ELEMENTS})


@pytest.mark.parametrize("config", every_config())
def test_regions_are_aligned_and_do_not_overlap(config):
    layout = OpLayout.of(config)
    for name in BLOCKS:
        block = getattr(layout, name)
        end = 0
        for field in block.fields:
            assert field.offset_bytes % 256 == 0
            assert field.offset_bytes >= end
            assert field.num_bytes == math.prod(field.shape) * field.dtype.itemsize
            end = field.offset_bytes + field.num_bytes
            assert block[field.region] is field
        assert block.num_bytes >= end
        assert block.num_bytes % 256 == 0


@pytest.mark.parametrize("config", every_config())
def test_sizes_by_an_independent_formula(config):
    world, tokens, topk, hidden = config.world_size, 17, 5, 256
    rows = world * tokens
    if config.max_total_recv_tokens:
        rows = min(rows, -(-config.max_total_recv_tokens // world) * world)
    cast = config.dispatch_quant_type or config.quant_type
    combines = {"fp8_direct_cast", "fp8_blockwise"}
    token_bytes = 2 if cast in combines | {"none"} and config.data_type != torch.float8_e4m3fn else 1
    scale_bytes = {"fp8_per_token": 4, "fp8_per_1x128": 8}.get(cast, config.scale_dim)
    scale_bytes //= 4 if config.scale_format == "ue8m0" else 1
    # scales travel as words beside a flagged row, or as one word for each byte
    scale_words = scale_bytes // 4 if scale_bytes % 4 == 0 else scale_bytes
    result_bytes = 4 if config.combine_dtype == torch.float32 else 2
    wire_bytes = 1 if config.quant_type in combines else result_bytes
    num_combine_scales = 2 if config.quant_type == "fp8_blockwise" else 0
    # 264 rows of all ranks together are ever flagged
    flagged, sent = world * min(tokens, config.flagged_max_tokens, max(1, 264 // world)), world * tokens
    int32, int64 = 4, 8
    expected = {
        "control": [
            int32,
            int32 * world,
            int32 * world,
            world * (world + 2) * int64,
            int32 * world,
            rows * topk * int32,
            rows * int32,
            flagged * hidden * token_bytes,
            flagged * (scale_words + 2 * topk + 1) * int64,
        ],
        "dispatch": [rows * hidden * token_bytes, rows * scale_bytes, rows * topk * 4],
        "combine": [sent * hidden * wire_bytes, sent * num_combine_scales * 4, sent * topk * 4],
        "local": [
            16 * int32,
            1024 * world * int64,
            int64,
            tokens * world * int32,
            tokens * topk * int32,
            tokens * min(world, topk) * int64,
            2 * world * int32,
            int32,
            3 * int32,
            3 * int32,
        ],
        "result": [tokens * hidden * result_bytes, tokens * topk * 4],
        "expert": [
            3 * rows * hidden * token_bytes,
            3 * rows * scale_bytes,
            3 * rows * 4,
            rows * topk * int32,
            rows * hidden * result_bytes,
        ]
        if config.layout == "expert_major"
        else [0],
    }
    layout = OpLayout.of(config)
    for name, sizes in expected.items():
        assert getattr(layout, name).num_bytes == sum(math.ceil(size / 256) * 256 for size in sizes), name


@pytest.mark.parametrize(("world_size", "num_experts"), [(8, 60), (8, 3), (3, 5), (72, 100), (5, 5)])
def test_uneven_experts_do_not_change_what_is_symmetric(world_size, num_experts):
    layouts = [
        OpLayout.of(
            config_of(
                world_size,
                rank=rank,
                num_experts=num_experts,
                num_experts_per_rank=num_owned_experts(num_experts, world_size, rank),
            )
        )
        for rank in range(world_size)
    ]
    for rank, layout in enumerate(layouts):
        for name in ("control", "dispatch", "combine", "result"):
            assert getattr(layout, name) == getattr(layouts[0], name), (name, rank)
        own = num_owned_experts(num_experts, world_size, rank)
        # a rank without experts still has a word there, so that no region is empty
        assert layout.local[Region.EXPERT_COUNTS].shape == (max(1, own),)


def test_a_rank_may_round_its_number_of_experts_up():
    """vLLM gives every rank the largest number; the layout goes by what the rank owns."""
    exact = OpLayout.of(config_of(8, rank=7, num_experts=60, num_experts_per_rank=7))
    rounded = OpLayout.of(config_of(8, rank=7, num_experts=60, num_experts_per_rank=8))
    assert exact == rounded


def test_padded_is_the_smallest_power_of_two():
    for count in range(1, 2000):
        lanes = padded(count)
        assert lanes >= count
        assert lanes & (lanes - 1) == 0
        assert lanes == 1 or lanes // 2 < count
