"""Plans an op's buffers by its sizes or by a model, and prints the plan."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from ep_a2a.commands.plan.model import DTYPES, read_model
from ep_a2a.commands.plan.sizes import RINGS_ASSUMED, plan_of
from ep_a2a.commands.plan.view import view_of
from ep_a2a.commands.plan.vllm import VllmOptions, assumptions, vllm_plan
from ep_a2a.commands.units import bytes_text
from ep_a2a.config import FP8_DTYPE, num_owned_experts
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from pathlib import Path

    from ep_a2a.commands.plan.sizes import Plan

MAX_GPU_BYTES = 512 << 30
"""More than any GPU has."""


def plan_op(
    *, ranks: int = 8, gpus_per_node: int | None = None, max_tokens: int = 4096, hidden_dim: int = 7168, topk: int = 8,
    experts: int = 256, dtype: torch.dtype | None = None, cast: str = "none", combine_quant: str = "none",
    **others: Any,
) -> tuple[Plan, list[str]]:  # fmt: skip
    """Returns the plan of an op of these sizes, and what it assumes."""
    kwargs = {
        "num_ep_ranks": ranks, "input_dtype": dtype or torch.bfloat16,
        "quant_dtype": None if cast == "none" else FP8_DTYPE, "token_hidden_size": hidden_dim,
        "max_num_tokens_per_dp_rank": max_tokens, "num_experts_per_token": topk,
        "num_experts": experts, "quant_type": combine_quant, "dispatch_quant_type": cast, **others,
    }  # fmt: skip
    if across := ranks > (gpus_per_node or ranks):
        kwargs["gpu_per_node"] = gpus_per_node
    configs = [
        config_from_handle_kwargs(
            {**kwargs, "rank": rank, "num_local_experts": num_owned_experts(experts, ranks, rank)},
            topology_internode=across,
        )
        for rank in range(ranks)
    ]
    return plan_of(configs), [RINGS_ASSUMED] if across else []


def plan_model(path: Path, options: dict[str, Any]) -> tuple[Plan, list[str]]:
    """Returns the plan of a model in vLLM, and what it assumes."""
    model, vllm_options = read_model(path), VllmOptions(**options)
    plan = vllm_plan(model, vllm_options)
    return plan, assumptions(model, vllm_options, plan.config)


def show(plan: Plan, assumed: list[str], *, as_json: bool, verbose: bool = False) -> None:
    """Prints a plan, with `verbose` all regions.

    Raises:
        ConfigError: no GPU has so much memory.
    """
    if (num_bytes := max(plan.bytes_by_rank)) > MAX_GPU_BYTES:
        raise ConfigError(
            f"buffers that fit into a GPU, at most {bytes_text(MAX_GPU_BYTES)}", bytes_text(num_bytes),
            "Lower the tokens per rank, the hidden size or the number of ranks.",
        )  # fmt: skip
    if as_json:
        sys.stdout.write(json.dumps({**plan.as_json_object(), "assumed": assumed}, indent=2) + "\n")
    else:
        Console().print(view_of(plan, assumed, verbose=verbose))


def dtype_named(name: str | None) -> torch.dtype | None:
    """Returns the dtype of --dtype; UnknownNameError where there is none of that name."""
    if name is not None and name not in DTYPES:
        raise UnknownNameError(f"--dtype to be one of {', '.join(DTYPES)}", repr(name))
    return None if name is None else DTYPES[name]
