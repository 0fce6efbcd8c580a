"""An op on a torch process group and nothing else: make_op, EpDispatchCombineOp(group=...), MORI's symmetric world."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ep_a2a
from ep_a2a import shmem
from ep_a2a.config import FP8_DTYPE
from ep_a2a.errors import (
    ConfigError,
    ConfigMismatchError,
    InputError,
    NotInitializedError,
    TooManyTokensError,
    UnknownNameError,
)
from ep_a2a.managers.native import NativeAll2AllManager
from ep_a2a.ops import EpDispatchCombineConfig, EpDispatchCombineOp
from ep_a2a.routing import num_distinct_ranks
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case

HIDDEN, TOPK, TOKENS = 128, 2, 5
SIZES = {"hidden_size": HIDDEN, "num_experts": 4, "topk": TOPK, "max_tokens": 8}


def check_step(op: EpDispatchCombineOp, num_experts: int) -> None:
    """Experts that return their input: every token comes back times the number of ranks it went to."""
    generator = torch.Generator().manual_seed(op.config.rank)
    x = torch.randint(-8, 8, (TOKENS, HIDDEN), generator=generator).bfloat16()
    ids = torch.rand(TOKENS, num_experts, generator=generator).topk(TOPK).indices.int()
    rows = op.dispatch(x, torch.ones(TOKENS, TOPK), None, ids).tokens
    combined = op.combine(rows.clone(), None, ids).tokens[:TOKENS]
    assert torch.equal(combined, x * num_distinct_ranks(ids, num_experts, op.config.world_size)[:, None])


def on_the_world(context: RankContext, num_experts: int) -> bool:
    op = ep_a2a.make_op(**SIZES | {"num_experts": num_experts})
    assert op.device == context.device
    for _ in range(2):
        check_step(op, num_experts)
    op.close()
    op.close()
    return op.arena.closed


@pytest.mark.parametrize("num_experts", [2, 4, 7])
def test_an_op_on_the_world(ranks, num_experts: int) -> None:
    assert ranks(on_the_world, 3, num_experts) == [True] * 3


def on_a_subgroup(context: RankContext) -> None:
    group = dist.new_group([0, 2])
    if context.rank == 1:
        return
    # each has memory of its own, so their steps may overlap
    with ep_a2a.make_op(group, **SIZES) as op, ep_a2a.make_op(group, **SIZES) as other:
        rows = op.dispatch(torch.ones(1, HIDDEN).bfloat16(), None, None, torch.tensor([[0, 3]]).int()).tokens
        check_step(other, 4)
        assert op.combine(rows.clone(), None, None).tokens[0].eq(2).all()


def test_ops_on_a_subgroup(ranks) -> None:
    ranks(on_a_subgroup, 3)


def on_two_nodes(context: RankContext) -> str:
    topology = NativeAll2AllManager.topology
    with mock.patch.object(NativeAll2AllManager, "topology", lambda manager, _: topology(manager, 2)):
        op = ep_a2a.make_op(**SIZES | {"num_experts": 8})
    check_step(op, 8)
    op.close()
    return op.config.kernel_type.name


def test_several_nodes_get_the_kernels_between_nodes(ranks) -> None:
    assert set(ranks(on_two_nodes, 4)) <= {"InterNodeV1", "InterNodeV1LL"}


def with_choices(context: RankContext) -> None:
    for quant in ("fp8_per_token", "fp8_per_1x128"):
        with ep_a2a.make_op(context.group, **SIZES, quant=quant, layout="rank_major") as op:
            # nothing is sent, so the other rank is not waited for
            with pytest.raises(TooManyTokensError, match=r"\. Raise max_tokens, or the step_tokens that was given"):
                op.dispatch(torch.ones(9, HIDDEN).bfloat16(), None, None, torch.zeros(9, TOPK).int())
            tokens, _, scales, _, _ = op.dispatch(
                torch.ones(1, HIDDEN).bfloat16(), None, None, torch.zeros(1, TOPK).int()
            )
            assert tokens.dtype == FP8_DTYPE
            assert tokens.shape == (context.world_size, 8, HIDDEN)
            assert scales is not None
    with ep_a2a.make_op(context.group, **SIZES, dtype=torch.float32, layout="expert_major", device="cpu") as op:
        assert op.dispatch(torch.ones(1, HIDDEN), torch.ones(1, TOPK), None, torch.zeros(1, TOPK).int())[0].dim() == 3


def test_it_takes_the_names_of_plan(ranks) -> None:
    ranks(with_choices, 2)


def refused(context: RankContext) -> tuple[type[BaseException], str]:
    hidden_size = 0 if context.rank == 1 else HIDDEN
    with pytest.raises((ConfigError, ConfigMismatchError)) as caught:
        ep_a2a.make_op(hidden_size=hidden_size, num_experts=4, topk=TOPK, max_tokens=8)
    for name, value in (("quant", "int3"), ("layout", "by_moon"), ("dtype", torch.int8)):
        with pytest.raises((ConfigError, UnknownNameError), match=f"^expected {name} to be one of .*{value}"):
            ep_a2a.make_op(**SIZES, **{name: value})
    with pytest.raises(ConfigError, match=r"^expected mask_after_secs to be .*; got 0"):
        ep_a2a.make_op(**SIZES, mask_after_secs=0)
    with pytest.raises(ConfigMismatchError, match="expected hidden_size to be the same on all ranks; got 128 on ranks"):
        ep_a2a.make_op(hidden_size=HIDDEN * (1 + context.rank), num_experts=4, topk=TOPK, max_tokens=8)
    return caught.type, str(caught.value)


def test_a_wrong_size_on_one_rank_is_an_error_on_all(ranks) -> None:
    (other, told), (own, said) = ranks(refused, 2)
    assert (other, own) == (ConfigMismatchError, ConfigError)
    assert "rank 1 failed with ConfigError: expected hidden_size" in told
    assert "hidden_size" in said
    assert "token_hidden_size" not in said


def outside(context: RankContext) -> str:
    group = dist.new_group([0])
    if context.rank == 0:
        return ""
    with pytest.raises(InputError, match=r"^expected group to be .*got 'default'"):
        ep_a2a.make_op("default", **SIZES)
    with pytest.raises(InputError, match="a group without this rank") as caught:
        ep_a2a.make_op(group, **SIZES)
    return str(caught.value.field)


def test_a_group_that_this_rank_is_not_in_is_refused(ranks) -> None:
    assert ranks(outside, 2) == ["", "group"]


def test_without_a_process_group_it_says_what_is_missing() -> None:
    with pytest.raises(NotInitializedError, match="init_process_group"):
        ep_a2a.make_op(**SIZES)


def config_of(context: RankContext) -> EpDispatchCombineConfig:
    return Case(context.world_size, HIDDEN, TOPK, 2 * context.world_size, max_tokens=8).config(context.rank)


def from_a_config(context: RankContext) -> bool:
    with EpDispatchCombineOp(config_of(context), group=context.group) as op:
        check_step(op, 2 * context.world_size)
    return op.arena.closed


def test_an_op_of_a_config_on_a_group(ranks) -> None:
    assert ranks(from_a_config, 2) == [True] * 2


def on_moris_world(context: RankContext) -> tuple[int, tuple[int, int]]:
    with pytest.raises(UnknownNameError, match="elsewhere"):
        shmem.shmem_torch_process_group_init("elsewhere")
    shmem.shmem_torch_process_group_init("default")
    with EpDispatchCombineOp(config_of(context)) as op:
        check_step(op, 2 * context.world_size)
    found = shmem.shmem_npes()
    shmem.shmem_finalize()
    group = dist.new_group([context.rank])
    torch._C._distributed_c10d._register_process_group("default", group)
    shmem.shmem_torch_process_group_init("default")
    alone = shmem.shmem_mype(), shmem.shmem_npes()
    shmem.shmem_finalize()
    torch._C._distributed_c10d._unregister_process_group("default")
    return found, alone


def test_moris_default_group_is_the_world_unless_one_is_registered(ranks) -> None:
    assert ranks(on_moris_world, 2) == [(2, (0, 1))] * 2


ALONE = """
import pathlib, sys
import torch, torch.distributed as dist
import ep_a2a
dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{sys.argv[1]}")
pathlib.Path(sys.argv[1]).unlink()
op = ep_a2a.make_op(hidden_size=64, num_experts=4, topk=2, max_tokens=4, device="cpu")
rows = op.dispatch(torch.ones(4, 64, dtype=torch.bfloat16), None, None, torch.zeros(4, 2, dtype=torch.int32)).tokens
print(op.combine(rows.clone(), None, None).tokens.sum().item())
"""


def test_a_rank_that_is_alone_needs_no_store(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ALONE, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["256.0"], done.stderr
