"""The layer's configurations and memory by arithmetic, and its kernel compiled for GPUs."""

import inspect
import re
from dataclasses import replace

import pytest
import torch

from ep_a2a.compat import ep_low_latency, triton_distributed
from ep_a2a.compat.combine_time_weights import exchange_kernel
from ep_a2a.compat.triton_distributed import EPLowLatencyAllToAllLayer, create_ep_ll_a2a_ctx
from ep_a2a.errors import NotInitializedError
from tests.cases.op_cases import Case
from tests.offline_compile import compile_kernel

ARGUMENTS = {
    EPLowLatencyAllToAllLayer: "max_m hidden topk online_quant_fp8 rank num_experts local_world_size world_size "
    "fp8_gsize dtype enable_profiling",
    create_ep_ll_a2a_ctx: "max_m hidden topk num_experts online_quant_fp8 fp8_gsize dtype world_size rank",
    EPLowLatencyAllToAllLayer.dispatch: "self send_tokens send_scales topk_indices",
    EPLowLatencyAllToAllLayer.combine: "self send_tokens topk_indices topk_weights dispatch_meta zero_copy",
}


def test_a_layer_needs_the_other_ranks_first():
    with pytest.raises(NotInitializedError, match="initialize_distributed"):
        EPLowLatencyAllToAllLayer(8, 256, 2, True, 0, 16, 2, 2)


@pytest.mark.parametrize("function", ARGUMENTS)
def test_arguments_are_those_of_triton_distributed(function):
    parameters = list(inspect.signature(function).parameters.values())
    assert [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD] == ARGUMENTS[function].split()
    if function is EPLowLatencyAllToAllLayer:
        assert [each.default for each in parameters[8:11]] == [128, torch.bfloat16, False]


@pytest.mark.parametrize(
    ("topk", "spans", "gpus_per_node"),
    [
        (6, False, 8),
        *(
            pytest.param(topk, spans, gpus_per_node, marks=pytest.mark.full)
            for topk, spans, gpus_per_node in (
                (1, False, 8),
                (8, False, 8),
                (1, True, 8),
                (6, True, 8),
                (8, True, 8),
                (6, False, 2),
            )
        ),
    ],
)
def test_the_exchange_of_weights_compiles_for_hopper(topk, spans, gpus_per_node):
    case = Case(world_size=8, num_experts=256, topk=topk, layout="expert_major", num_nodes=8 // gpus_per_node)
    config = replace(case.config(3), internode_transport="torch.distributed" if gpus_per_node < 8 else "auto")
    kernel = exchange_kernel(config, spans=spans)
    assert kernel.constants["GPUS"] == gpus_per_node
    asm = compile_kernel(kernel)
    # judged and used are one load: one before the loop and one in it
    polled = [line for line in asm["ttgir"].splitlines() if "isVolatile = true" in line and "%words" in line]
    assert len(polled) == 2
    assert min(kernel.constants["BLOCK_WORDS"], kernel.constants["BLOCK_ROWS"] * topk) >= 32 * kernel.num_warps
    assert re.search(r"ld\.volatile\.global", asm["ptx"])


def test_the_package_has_a_second_path():
    for name in triton_distributed.__all__:
        assert getattr(ep_low_latency, name) is getattr(triton_distributed, name)
