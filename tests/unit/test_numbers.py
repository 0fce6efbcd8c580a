"""Numbers that callers give: what is none is refused by its name, wherever it is given."""

import numpy as np
import pytest
import torch

from ep_a2a import routing
from ep_a2a.compat.deep_ep import Buffer, Config
from ep_a2a.compat.deep_ep.layouts import check_num_experts
from ep_a2a.config import num_owned_experts
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.config.requirements import MAX_INTEGER, checked_integer, checked_seconds
from ep_a2a.errors import ConfigError, EpA2AError
from ep_a2a.ops.inputs import check_integer
from ep_a2a.ops.memory import Timeouts
from ep_a2a.parallel.state import init_dist_env
from ep_a2a.shmem import shmem_malloc
from ep_a2a.testing import RankPool
from tests.unit.test_managers import handle_kwargs

NO_NUMBERS = [True, np.True_, torch.tensor(True), "1", None, [1], float("nan"), 10**5000]
TAKERS = {
    "timeout_secs": Timeouts.same,
    "timeout_secs of kwargs": lambda value: config_from_handle_kwargs(handle_kwargs(timeout_secs=value), False),
    "num_experts_per_token": lambda value: config_from_handle_kwargs(handle_kwargs(num_experts_per_token=value), False),
    "num_ep_ranks": lambda value: config_from_handle_kwargs(handle_kwargs(num_ep_ranks=value), True),
    "world_size": RankPool,
    "grace_secs": lambda value: RankPool(1, grace_secs=value),
    "tensor_model_parallel_size": lambda value: init_dist_env(value, 0),
    "rankID": lambda value: init_dist_env(1, value),
    "num_experts": lambda value: routing.expert_ranges(value, 2),
    "num_experts of a rank": lambda value: num_owned_experts(value, 2, 0),
    "num_experts of a layout": lambda value: check_num_experts(value, 1),
    "new_num_sms": Buffer.set_num_sms,
    "num_sms": Config,
    "num_bytes": shmem_malloc,
    "tag": lambda value: check_integer("tag", value),
}


@pytest.mark.parametrize("name", TAKERS)
def test_what_is_no_number_is_refused_by_its_name(name):
    for value in NO_NUMBERS:
        if value is None and name == "timeout_secs of kwargs":
            continue
        with pytest.raises(EpA2AError, match=rf"expected {name.partition(' ')[0]} ") as caught:
            TAKERS[name](value)
        assert len(caught.value.got) < 100


def test_numbers_of_other_types_are_taken():
    for value in (5, np.int64(5), np.uint8(5), torch.tensor(5)):
        assert type(checked_integer("count", value, 0)) is int
    for value in (5, 5.0, np.float32(5), np.int32(5)):
        assert type(checked_seconds("secs", value)) is float
    with pytest.raises(ConfigError, match=f"count <= {MAX_INTEGER}"):
        checked_integer("count", MAX_INTEGER + 1, 0)
