"""Launch numbers on CPU, on one H200 and on devices made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.policy import INTERPRETED_PROGRAMS, Launch, Phase, choose_launch

H200_SMS = 132
# Registers let 16 warps of these kernels stay on a multiprocessor, in at most 4 programs.
WARPS_PER_SM = 16
PROGRAMS_PER_SM = 4


def config_of(**changes: Any) -> EpDispatchCombineConfig:
    values: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "rank": 0,
        "world_size": 8,
        "hidden_dim": 7168,
        "scale_dim": 0,
        "scale_type_size": 0,
        "max_token_type_size": 2,
        "max_num_inp_token_per_rank": 4096,
        "num_experts_per_rank": 32,
        "num_experts_per_token": 8,
    }
    return EpDispatchCombineConfig(**{**values, **changes})


def numbers(launch: Launch) -> tuple[int, int]:
    return launch.num_programs, launch.num_warps


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("num_tokens", [0, 1, 4096])
def test_interpreted_launches_are_few_programs(phase, num_tokens):
    assert choose_launch(config_of(), phase, num_tokens, 0) == Launch(INTERPRETED_PROGRAMS, 1, "interpreter")
    assert choose_launch(config_of(launch="manual"), phase, num_tokens, 0).num_programs == INTERPRETED_PROGRAMS


def test_interpreted_launches_take_the_callers_number_if_it_is_small():
    for block_num in (1, 2, 3, 4):
        assert choose_launch(config_of(), Phase.DISPATCH, 16, 0, block_num, 8) == Launch(block_num, 1, "interpreter")
    # seed 000's example asks for 80
    for block_num in (-1, 0, 5, 80):
        assert choose_launch(config_of(), Phase.DISPATCH, 16, 0, block_num).num_programs == INTERPRETED_PROGRAMS


@pytest.mark.parametrize(
    ("num_tokens", "num_programs"), [(0, 1), (1, 1), (16, 16), (132, 132), (133, 132), (4096, 132)]
)
def test_dispatch_has_one_program_per_token_up_to_one_per_multiprocessor(num_tokens, num_programs):
    launch = choose_launch(config_of(), Phase.DISPATCH, num_tokens, H200_SMS)
    assert launch == Launch(num_programs, 8, "analytic")


@pytest.mark.parametrize("phase", [Phase.STAGE, Phase.COMBINE])
@pytest.mark.parametrize(
    ("hidden_dim", "num_tokens", "num_programs"),
    [(7168, 0, 1), (7168, 1, 7), (7168, 75, 525), (7168, 76, 528), (7168, 4096, 528), (1024, 5, 5), (1032, 5, 10)],
)
def test_combine_has_one_program_per_block_of_elements(phase, hidden_dim, num_tokens, num_programs):
    launch = choose_launch(config_of(hidden_dim=hidden_dim), phase, num_tokens, H200_SMS)
    assert launch == Launch(num_programs, 4, "analytic")


def test_manual_launches_take_the_configs_numbers():
    config = config_of(launch="manual", block_num=80, warp_num_per_block=16)
    assert choose_launch(config, Phase.DISPATCH, 1, H200_SMS) == Launch(80, 16, "config")
    # MORI's 80 blocks of 16 warps: one program of 16 warps fits on a multiprocessor
    assert choose_launch(config, Phase.COMBINE, 1, H200_SMS) == Launch(80, 16, "config")
    many = config_of(launch="manual", block_num=1000, warp_num_per_block=4)
    assert numbers(choose_launch(many, Phase.DISPATCH, 1, H200_SMS)) == (132, 4)
    assert numbers(choose_launch(many, Phase.COMBINE, 1, H200_SMS)) == (528, 4)


def test_automatic_launches_ignore_the_configs_numbers():
    config = config_of(block_num=3, warp_num_per_block=2)
    assert choose_launch(config, Phase.DISPATCH, 4096, H200_SMS) == Launch(132, 8, "analytic")


@pytest.mark.parametrize("launch", ["auto", "manual"])
def test_the_callers_numbers_come_first(launch):
    config = config_of(launch=launch, block_num=64, warp_num_per_block=16)
    assert choose_launch(config, Phase.DISPATCH, 1, H200_SMS, 80, 8) == Launch(80, 8, "caller")
    assert choose_launch(config, Phase.COMBINE, 4096, H200_SMS, 20) == Launch(
        20, 4 if launch == "auto" else 16, "caller"
    )
    assert choose_launch(config, Phase.DISPATCH, 4096, H200_SMS, warp_per_block=4).num_warps == 4


@pytest.mark.parametrize(
    ("asked", "given_"), [(1, 1), (2, 2), (3, 2), (7, 4), (8, 8), (12, 8), (16, 16), (24, 16), (64, 16)]
)
def test_warps_are_a_power_of_two_up_to_sixteen(asked, given_):
    assert choose_launch(config_of(), Phase.DISPATCH, 64, H200_SMS, warp_per_block=asked).num_warps == given_


@pytest.mark.parametrize(("max_sms", "sms"), [(0, 132), (1, 1), (20, 20), (132, 132), (500, 132)])
def test_max_sms_bounds_every_grid(max_sms, sms):
    config = config_of(max_sms=max_sms)
    assert choose_launch(config, Phase.DISPATCH, 4096, H200_SMS).num_programs == sms
    assert choose_launch(config, Phase.COMBINE, 4096, H200_SMS).num_programs == 4 * sms
    manual = config_of(max_sms=max_sms, launch="manual", block_num=1000)
    assert choose_launch(manual, Phase.DISPATCH, 4096, H200_SMS).num_programs <= 2 * sms
    assert choose_launch(config, Phase.DISPATCH, 4096, H200_SMS, 1000).num_programs == sms


def test_a_rack_of_72_ranks():
    config = config_of(world_size=72, num_experts_per_rank=4, gpu_per_node=72)
    for phase in Phase:
        launch = choose_launch(config, phase, 72 * 4096, H200_SMS)
        assert launch.num_programs == H200_SMS * (1 if phase is Phase.DISPATCH else 4)


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(
    phase=st.sampled_from(Phase),
    num_tokens=st.integers(0, 1 << 20),
    num_sms=st.integers(1, 200),
    max_sms=st.sampled_from([0, 1, 7, 64, 300]),
    launch=st.sampled_from(["auto", "manual"]),
    config_numbers=st.tuples(st.integers(1, 5000), st.integers(1, 64)),
    call_numbers=st.tuples(st.integers(-1, 5000), st.integers(-1, 64)),
    world_size=st.sampled_from([1, 3, 8, 72]),
)
def test_no_grid_exceeds_what_fits(
    phase, num_tokens, num_sms, max_sms, launch, config_numbers, call_numbers, world_size
):
    """Every program may wait for other ranks: one that is not resident would never let the others go on."""
    config = config_of(
        world_size=world_size, max_sms=max_sms, launch=launch,
        block_num=config_numbers[0], warp_num_per_block=config_numbers[1],
    )  # fmt: skip
    chosen = choose_launch(config, phase, num_tokens, num_sms, *call_numbers)
    sms = min(num_sms, max_sms or num_sms)
    assert 1 <= chosen.num_programs <= PROGRAMS_PER_SM * sms
    assert chosen.num_warps in (1, 2, 4, 8, 16)
    assert chosen.num_programs * chosen.num_warps <= WARPS_PER_SM * sms
    assert chosen.reason in ("analytic", "config", "caller")
    # the same question has the same answer: ranks and replays must not differ
    assert chosen == choose_launch(config, phase, num_tokens, num_sms, *call_numbers)
