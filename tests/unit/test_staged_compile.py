"""The kernels around an exchange of the host compile for GPUs, without spilling, and move rows in vectors."""

import functools
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ep_a2a.config import EpDispatchCombineKernelType
from ep_a2a.ops.staged import StagedEngine
from tests.cases.configs import deepseek_v3
from tests.markers import first_is_quick
from tests.offline_compile import check_moves

NUM_SMS = 132
FORMS = {
    "bf16": {},
    "cast": {"quant_type": "fp8_per_1x128", "layout": "compact"},
    "combine-cast": {"quant_type": "fp8_blockwise"},
    "scales": {"data_type": torch.float8_e4m3fn, "scale_dim": 56, "scale_type_size": 4},
    "fp32": {"data_type": torch.float32},
}


# on 4 nodes of 8
config_of = functools.partial(
    deepseek_v3,
    world_size=32,
    num_experts_per_rank=8,
    gpu_per_node=8,
    layout="rank_major",
    kernel_type=EpDispatchCombineKernelType.InterNodeV1,
    compiled_calls="serving",
    internode_transport="torch.distributed",
)


class MadeUp:
    """An arena, and memory bound to it, of which no launch is made."""

    device = torch.device("cpu")
    rendezvous = between_nodes = None
    table = torch.zeros(64, 32, dtype=torch.int64)


@pytest.mark.parametrize("changes", first_is_quick(FORMS.items()))
def test_they_compile(changes: dict[str, Any], tmp_path: Path) -> None:
    arena = cast("Any", MadeUp())
    engine = StagedEngine(config_of(**changes), arena, arena, arena)
    engine.kernels.num_sms = NUM_SMS
    moving = {"pack_kernel", "forward_kernel", "pack_sums_kernel", "sum_nodes_kernel"}
    # others are of rings, or of an op inside a node
    wanted = {*moving, "pass_on_kernel", "post_failure_kernel"}
    check_moves((each for each in engine.compiled_kernels() if each.kernel.__name__ in wanted), moving, tmp_path)
