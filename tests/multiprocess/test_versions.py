"""Ranks that have different versions of this package: an error that says so, wherever they meet first."""

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import ep_a2a
from ep_a2a.errors import ConfigMismatchError
from ep_a2a.managers.registry import create_manager
from ep_a2a.memory import rendezvous
from ep_a2a.memory.rendezvous import UNKNOWN, Rendezvous
from ep_a2a.memory.subgroups import make_subgroup
from ep_a2a.testing import RankContext, RankPool
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case
from tests.cases.op_checks import raised

OWN = rendezvous.WIRE_FORMAT_VERSION
CASE = Case(world_size=2)


def get_handle(context: RankContext, backend: str) -> None:
    manager = create_manager(backend, context.group)
    manager.device = torch.device("cpu")
    manager.get_handle(kwargs_of(CASE, context.rank))


def init(context: RankContext) -> None:
    sizes = {"tensor_model_parallel_size": 1, "data_parallel_size": 2}
    ep_a2a.init_dist_env(rankID=0, data_parallel_rank=context.rank, backend="gloo", **sizes)


# every way in which ranks of a group meet for the first time
WAYS: dict[str, Callable[[RankContext], object]] = {
    "op": lambda context: ep_a2a.make_op(
        context.group, hidden_size=64, num_experts=4, topk=2, max_tokens=4, device="cpu"
    ),
    "ep_a2a": lambda context: get_handle(context, "ep_a2a"),
    "naive": lambda context: get_handle(context, "naive"),
    "subgroup": lambda context: make_subgroup(context.group, [1, 0]),
    "init_dist_env": init,
}


def meet_first(context: RankContext, way: str) -> None:
    versions = [f"{OWN + rank} on ranks [{rank}]" for rank in range(2)]
    named = "; ".join(reversed(versions) if way == "subgroup" else versions)
    with mock.patch.object(rendezvous, "WIRE_FORMAT_VERSION", OWN + context.rank):
        raised(ConfigMismatchError, lambda: WAYS[way](context), named, "Install the same version")


def test_a_rank_of_another_version_is_an_error_at_construction() -> None:
    with RankPool(2) as pool:
        for way in WAYS:
            pool.run(meet_first, way)


def meet_an_older_rank(context: RankContext) -> None:
    """Rank 1 writes what a version did that knew of no version number."""
    meeting = Rendezvous(context.group, timeout_secs=20)
    if context.rank == 1:
        key = meeting._key(meeting._sequence + 1, 1)
        meeting._store.set(key, json.dumps(["symmetric memory size", [4096, "cpu"]]))
    else:
        named = f"{OWN} on ranks [0]; {UNKNOWN} on ranks [1]"
        raised(ConfigMismatchError, lambda: meeting.exchange("symmetric memory size", [4096, "cpu"]), named)


def test_a_rank_that_does_not_say_its_version(ranks: Any) -> None:
    ranks(meet_an_older_rank, 2)
