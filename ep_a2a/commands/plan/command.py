"""Plans an op's buffers by its sizes or by a model, and prints the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.commands import messages
from ep_a2a.commands.files import check_can_write, give_json
from ep_a2a.commands.options import given, refuse
from ep_a2a.commands.plan.model import DTYPES, read_model
from ep_a2a.commands.plan.sizes import RINGS_ASSUMED, plan_of
from ep_a2a.commands.plan.view import view_of
from ep_a2a.commands.plan.vllm import VllmOptions, assumptions, vllm_plan
from ep_a2a.commands.units import bytes_text
from ep_a2a.config import FP8_DTYPE, QuantType, num_owned_experts, parse_enum
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from pathlib import Path

    from ep_a2a.commands.plan.sizes import Plan

MAX_GPU_BYTES = 512 << 30
"""More than any GPU has."""


FOR_MODEL = (
    "data_parallel_size",
    "tensor_parallel_size",
    "max_num_batched_tokens",
    "num_redundant_experts",
    "sequence_parallel",
)
FOR_OP = (
    "ranks",
    "max_tokens",
    "topk",
    "experts",
    "layout",
    "combine_quant",
    "scale_format",
    "max_total_recv_tokens",
    "flagged_max_tokens",
)
BETWEEN_NODES = ("nodes", "nic_gbps", "chunk_tokens", "credits", "markdown", "plot", "seed")
"""Parameters of the command by what they are for."""


def execute(options: dict[str, Any]) -> None:
    """Prints and writes what is asked for.

    Args:
        options: of `ep-a2a plan` by parameter, None where not given.

    Raises:
        ConfigError: options exclude each other, or a size is impossible.
    """
    for_model, for_op, between = ({name: options[name] for name in some} for some in (FOR_MODEL, FOR_OP, BETWEEN_NODES))
    vllm, as_json, output = options["vllm"], options["as_json"], options["output"]
    for_both = {
        "gpus_per_node": options["gpus_per_node"],
        "hidden": options["hidden"],
        "dtype": dtype_named(options["dtype"]),
        "quant": options["quant"] and options["quant"].value,
    }
    check_can_write(output)
    if options["nodes"] is not None or options["published"]:
        from ep_a2a.commands.plan.nodes import show_nodes

        refuse({"vllm": vllm, **for_model}, "with --nodes or --published", "Leave it out.")
        chosen = {**between, **for_op, **for_both, "output": output}
        show_nodes(chosen, is_published=options["published"], as_json=as_json)
        return
    refuse(between, "without --nodes", "Say --nodes.")
    if vllm is None:
        refuse(for_model, "without --vllm", "Name the model's config.json by --vllm.")
        if for_both["quant"] in (None, QuantType.NONE.value):
            refuse({"scale_format": for_op["scale_format"]}, "without --quant", "Name the cast that writes scales.")
        plan, assumed = plan_op(**given(for_op), **given(for_both))
    else:
        refuse(for_op, "with --vllm", "Leave it out: the model and vLLM's options decide it.")
        named = {"hidden_dim": for_both.pop("hidden"), "cast": for_both.pop("quant")}
        plan, assumed = plan_model(vllm, {"data_parallel_size": 1, **given(for_model | for_both | named)})
    show(plan, assumed, as_json=as_json, output=output, verbose=options["verbose"])


def plan_op(
    *,
    ranks: int = 8,
    gpus_per_node: int | None = None,
    max_tokens: int = 4096,
    hidden: int = 7168,
    topk: int = 8,
    experts: int = 256,
    dtype: torch.dtype | None = None,
    quant: str = "none",
    combine_quant: str = "none",
    **others: Any,
) -> tuple[Plan, list[str]]:
    """Returns the plan of an op of these sizes, and what it assumes."""
    parse_enum(QuantType, combine_quant, "combine_quant")
    kwargs = {
        "num_ep_ranks": ranks,
        "input_dtype": dtype or torch.bfloat16,
        "quant_dtype": None if quant == "none" else FP8_DTYPE,
        "token_hidden_size": hidden,
        "max_num_tokens_per_dp_rank": max_tokens,
        "num_experts_per_token": topk,
        "num_experts": experts,
        "quant_type": combine_quant,
        "dispatch_quant_type": quant,
        **others,
    }
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


def show(plan: Plan, assumed: list[str], *, as_json: bool, output: Path | None = None, verbose: bool = False) -> None:
    """Prints a plan, with `verbose` all regions.

    Raises:
        ConfigError: no GPU has so much memory.
    """
    if (num_bytes := max(plan.bytes_by_rank)) > MAX_GPU_BYTES:
        raise ConfigError(
            f"buffers that fit into a GPU, at most {bytes_text(MAX_GPU_BYTES)}",
            bytes_text(num_bytes),
            "Lower the tokens per rank, the hidden size or the number of ranks.",
        )
    give_json({**plan.as_json_object(), "assumed": assumed}, output, as_json=as_json)
    if not as_json:
        messages.output().print(view_of(plan, assumed, verbose=verbose))


def dtype_named(name: str | None) -> torch.dtype | None:
    """Returns the dtype of --dtype; UnknownNameError where there is none of that name."""
    if name is not None and name not in DTYPES:
        raise UnknownNameError(f"to be one of {', '.join(DTYPES)}", repr(name), field="dtype")
    return None if name is None else DTYPES[name]
