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
from ep_a2a.commands.tables import bytes_text
from ep_a2a.config import FP8_DTYPE, QuantType, num_owned_experts, parse_enum
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from types import SimpleNamespace

    from ep_a2a.commands.plan.sizes import Plan

MAX_GPU_BYTES = 512 << 30
"""More than any GPU has."""


def execute(
    options: SimpleNamespace, for_model: dict[str, Any], for_op: dict[str, Any], between: dict[str, Any]
) -> None:
    """Prints and writes what is asked for.

    Args:
        options: of `ep-a2a plan`, None where not given.
        for_model, for_op, between: those that act only for a model, for an op of named sizes, between nodes.

    Raises:
        ConfigError: options exclude each other, or a size is impossible.
    """
    for_both = {
        "gpus_per_node": options.gpus_per_node,
        "hidden": options.hidden,
        "dtype": dtype_named(options.dtype),
        "quant": options.quant and options.quant.value,
    }
    check_can_write(options.output)
    if options.nodes is not None or options.published:
        from ep_a2a.commands.plan.nodes import show_nodes

        refuse({"vllm": options.vllm, **for_model}, "with --nodes or --published", "Leave it out.")
        chosen = {"nodes": options.nodes, **between, **for_op, **for_both, "output": options.output}
        show_nodes(chosen, is_published=options.published, as_json=options.as_json)
        return
    refuse(between, "without --nodes", "Say --nodes.")
    if options.vllm is None:
        refuse(for_model, "without --vllm", "Name the model's config.json by --vllm.")
        if for_both["quant"] in (None, QuantType.NONE.value):
            refuse({"scale_format": options.scale_format}, "without --quant", "Name the cast that writes scales.")
        plan, assumed = plan_op(**given(for_op | for_both))
    else:
        refuse(for_op, "with --vllm", "Leave it out: the model and vLLM's options decide it.")
        of_op = {"hidden_dim": for_both.pop("hidden"), "cast": for_both.pop("quant")}
        vllm_options = VllmOptions(**{"data_parallel_size": 1, **given(for_model | for_both | of_op)})
        model = read_model(options.vllm)
        plan = vllm_plan(model, vllm_options)
        assumed = assumptions(model, vllm_options, plan.config)
    show(plan, assumed, options)


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


def show(plan: Plan, assumed: list[str], options: SimpleNamespace) -> None:
    """Prints and writes a plan as the options say; raises ConfigError where no GPU has so much memory."""
    if (num_bytes := max(plan.bytes_by_rank)) > MAX_GPU_BYTES:
        raise ConfigError(
            f"buffers that fit into a GPU, at most {bytes_text(MAX_GPU_BYTES)}",
            bytes_text(num_bytes),
            "Lower the tokens per rank, the hidden size or the number of ranks.",
        )
    give_json({**plan.as_json_object(), "assumed": assumed}, options.output, as_json=options.as_json)
    if not options.as_json:
        messages.output().print(view_of(plan, assumed, verbose=options.verbose))


def dtype_named(name: str | None) -> torch.dtype | None:
    """Returns the dtype of --dtype; UnknownNameError where there is none of that name."""
    if name is not None and name not in DTYPES:
        raise UnknownNameError(f"to be one of {', '.join(DTYPES)}", repr(name), field="dtype")
    return None if name is None else DTYPES[name]
