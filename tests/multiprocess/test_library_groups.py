"""Libraries that serve one group of ranks per process: a second group is refused on all its ranks."""

import contextlib
import datetime
from typing import Any

import pytest
import torch.distributed as dist

from ep_a2a.errors import ConfigMismatchError, UnsupportedError
from ep_a2a.managers.external.library import LibraryAll2AllManager
from ep_a2a.testing import RankContext, run_ranks
from tests.cases import parity_cases
from tests.library_stand_ins import FlashInferOneSidedManager, FlashInferTwoSidedManager, MoriLowLatencyManager

HIDDEN_DIM = 32
TIMEOUT = datetime.timedelta(hours=1)
"""Longer than the ranks may take: nobody waits for it."""


class NotBuilt(Exception):
    """What the library would do comes next."""


@staticmethod
def not_built(*_: Any) -> Any:
    """Stands for the class of ops."""
    raise NotBuilt


class OneSided(FlashInferOneSidedManager):
    op_type = not_built


class TwoSided(FlashInferTwoSidedManager):
    op_type = not_built


LAYOUTS = {OneSided: "rank_major", TwoSided: "compact", MoriLowLatencyManager: "compact"}


def make_op(context: RankContext, kind: type[LibraryAll2AllManager], group: dist.ProcessGroup) -> None:
    """Builds an op on a group, up to the library where that needs GPUs."""
    manager = kind(group)
    manager.device = context.device
    kwargs = parity_cases.handle_kwargs(context, LAYOUTS[kind], HIDDEN_DIM)
    with contextlib.suppress(NotBuilt):
        manager.get_handle(kwargs | {"rank": manager.rank, "num_ep_ranks": manager.world_size})
    manager.destroy()


def refuses_another_group(context: RankContext, kind: type[LibraryAll2AllManager]) -> None:
    first, second, again = (dist.new_group(ranks, timeout=TIMEOUT) for ranks in ([0, 1], [0, 2], [0, 1]))
    if context.rank < 2:
        make_op(context, kind, first)
        # one group after the other counts as well
        make_op(context, kind, first)
    if context.rank == 0:
        with pytest.raises(UnsupportedError, match=r"global ranks \[0, 1\]; got a second one, .* \[0, 2\]"):
            make_op(context, kind, second)
    if context.rank == 2:
        # this process has used the library in no group, and must not wait for rank 0
        with pytest.raises(ConfigMismatchError, match="rank 0 failed with UnsupportedError"):
            make_op(context, kind, second)
    if context.rank < 2 and kind is not MoriLowLatencyManager:
        make_op(context, kind, again)
    if context.rank < 2 and kind is OneSided:
        make_op(context, TwoSided, again)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_second_group_is_refused_on_all_its_ranks(kind: type[LibraryAll2AllManager]) -> None:
    run_ranks(refuses_another_group, 3, kind)
