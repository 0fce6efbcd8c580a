"""Plans an op's buffers by its sizes or by a model, and prints the plan."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch

from ep_a2a.commands import messages
from ep_a2a.commands.files import check_can_write, give_json
from ep_a2a.commands.options import check_topk, given, refuse
from ep_a2a.commands.plan.model import DTYPES, read_model
from ep_a2a.commands.plan.sizes import RINGS_ASSUMED, Plan, for_training, plan_of
from ep_a2a.commands.plan.view import view_of
from ep_a2a.commands.plan.vllm import VllmOptions, assumptions, vllm_plan
from ep_a2a.commands.tables import bytes_text
from ep_a2a.config import FP8_DTYPE, QuantType, num_owned_experts, parse_enum
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.errors import ConfigError, UnknownNameError

DEFAULTS = {
    "ranks": 8,
    "gpus_per_node": None,
    "max_tokens": 4096,
    "hidden": 7168,
    "topk": 8,
    "experts": 256,
    "dtype": torch.bfloat16,
    "quant": "none",
    "combine_quant": "none",
}
OF_ANY = ("gpus_per_node", "hidden", "dtype", "quant")
OF_A_MODEL = tuple(each.name for each in fields(VllmOptions) if each.name not in OF_ANY)
OF_AN_OP = (
    *("ranks", "max_tokens", "topk", "experts", "layout", "combine_quant", "scale_format", "max_total_recv_tokens"),
    "flagged_max_tokens",
)
"""Options that act in every kind of plan, and those that act in one kind only."""
MAX_GPU_BYTES = 512 << 30
"""More than any GPU has."""


def execute(options: SimpleNamespace) -> None:
    """Prints and writes what is asked for.

    Args:
        options: by name, as cli/plan.py declares them; None where not given.

    Raises:
        ConfigError: options exclude each other, a size is impossible, or no GPU has so much memory.
    """
    if options.dtype not in (None, *DTYPES):
        raise UnknownNameError(f"to be one of {', '.join(DTYPES)}", repr(options.dtype), field="dtype")
    typed = vars(options) | {"dtype": DTYPES.get(options.dtype), "quant": options.quant and options.quant.value}
    for_any, for_model, for_op = ({name: typed[name] for name in names} for names in (OF_ANY, OF_A_MODEL, OF_AN_OP))
    check_can_write(options.output)
    if options.vllm is None:
        refuse(for_model, "without --vllm", "Name the model's config.json by --vllm.")
        if for_any["quant"] in (None, QuantType.NONE.value):
            refuse({"scale_format": options.scale_format}, "without --quant", "Name the cast that writes scales.")
        plan, assumed = plan_op(**given(for_op | for_any))
    else:
        refuse(for_op, "with --vllm", "Leave it out: the model and vLLM's options decide it.")
        vllm_options = VllmOptions(**given(for_model | for_any))
        model = read_model(options.vllm)
        plan = vllm_plan(model, vllm_options)
        assumed = assumptions(model, vllm_options, plan.config)
    if options.training:
        plan = for_training(plan)
    if (num_bytes := max(plan.bytes_by_rank)) > MAX_GPU_BYTES:
        remedy = "Lower the tokens per rank, the hidden size or the number of ranks."
        most = f"buffers that fit into a GPU, at most {bytes_text(MAX_GPU_BYTES)}"
        raise ConfigError(most, bytes_text(num_bytes), remedy)
    give_json(plan.as_json_object() | {"assumed": assumed}, options.output, as_json=options.as_json)
    if not options.as_json:
        messages.output().print(view_of(plan, assumed))


def plan_op(**options: Any) -> tuple[Plan, list[str]]:
    """Returns the plan of an op, and what it assumes.

    Args:
        options: those of `ep-a2a plan` that are given.
    """
    chosen = SimpleNamespace(**DEFAULTS | options)
    parse_enum(QuantType, chosen.combine_quant, "combine_quant")
    check_topk(chosen.topk, chosen.experts)
    across = chosen.ranks > (chosen.gpus_per_node or chosen.ranks)
    kwargs = {
        "num_ep_ranks": chosen.ranks,
        "input_dtype": chosen.dtype,
        "quant_dtype": None if chosen.quant == "none" else FP8_DTYPE,
        "token_hidden_size": chosen.hidden,
        "max_num_tokens_per_dp_rank": chosen.max_tokens,
        "num_experts_per_token": chosen.topk,
        "num_experts": chosen.experts,
        "quant_type": chosen.combine_quant,
        "dispatch_quant_type": chosen.quant,
        **{name: value for name, value in options.items() if name not in DEFAULTS},
    }
    if across:
        kwargs["gpu_per_node"] = chosen.gpus_per_node
    configs = []
    for rank in range(chosen.ranks):
        own = {"rank": rank, "num_local_experts": num_owned_experts(chosen.experts, chosen.ranks, rank)}
        configs.append(config_from_handle_kwargs(kwargs | own, topology_internode=across))
    return plan_of(configs), [RINGS_ASSUMED] if across else []
