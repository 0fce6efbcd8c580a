"""Plans the op of vLLM's MoE layers from a model's config and vLLM's options, without vLLM."""

from dataclasses import dataclass

import torch

from ep_a2a.commands.plan.families import table
from ep_a2a.commands.plan.model import MoeModel
from ep_a2a.commands.plan.sizes import Plan, op_facts, plan_of
from ep_a2a.config import FP8_GROUP_SIZE, MX_GROUP_SIZE, EpDispatchCombineConfig, num_owned_experts
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.errors import ConfigError, UnsupportedError
from ep_a2a.integrations.token_format import LayerShape, TokenFormat, handle_kwargs, tokens_per_rank
from ep_a2a.integrations.vllm.token_format import token_format_of

DEFAULT_MAX_NUM_BATCHED_TOKENS = 8192
"""vLLM's for `vllm serve` on GPUs like H100 and H200."""
PADDED_MULTIPLE = 256
OTHER_CASTS = {"MXFP8": ("mxfp8", MX_GROUP_SIZE), "MXFP4": ("fp8_per_1x128", FP8_GROUP_SIZE)}
"""Cast of other experts than those planned for, and the elements that rows are a multiple of, by weights."""
GPUS_PER_NODE = 8
TRANSPORT = "torch.distributed"
"""Transport of ops between hosts unless EP_A2A_INTERNODE_TRANSPORT names another."""


@dataclass(frozen=True)
class VllmOptions:
    """vLLM's options that a plan depends on, and values that replace those of config.json.

    Attributes:
        data_parallel_size, tensor_parallel_size: of `vllm serve`. The expert-parallel group is their product.
        max_num_batched_tokens: tokens of a replica's step; None = DEFAULT_MAX_NUM_BATCHED_TOKENS.
        num_redundant_experts: of vLLM's expert load balancer, over all ranks.
        sequence_parallel: whether tensor-parallel ranks share their replica's tokens; None = as the model's layers do.
        gpus_per_node: ranks of each node; None = GPUS_PER_NODE, or all where there are fewer.
        hidden, dtype, quant: instead of what the model's config says; None = as it says.
    """

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    max_num_batched_tokens: int | None = None
    num_redundant_experts: int = 0
    sequence_parallel: bool | None = None
    gpus_per_node: int | None = None
    hidden: int | None = None
    dtype: torch.dtype | None = None
    quant: str | None = None

    @property
    def world_size(self) -> int:
        """Ranks that exchange tokens."""
        return self.data_parallel_size * self.tensor_parallel_size

    @property
    def node_size(self) -> int:
        """Ranks of each node."""
        return self.gpus_per_node or min(GPUS_PER_NODE, self.world_size)

    @property
    def num_nodes(self) -> int:
        """Nodes of that size."""
        return self.world_size // self.node_size

    def sequence_parallel_size(self, model: MoeModel) -> int:
        """Ranks that share a replica's tokens."""
        chosen = model.shares_tokens if self.sequence_parallel is None else self.sequence_parallel
        return self.tensor_parallel_size if chosen else 1


def vllm_configs(model: MoeModel, options: VllmOptions) -> list[EpDispatchCombineConfig]:
    """Returns the config of each rank's op, as `EpA2APrepareAndFinalize.post_init_setup` makes it.

    Raises:
        UnsupportedError: vLLM would make no op.
        ConfigError: vLLM refuses the number of experts, the nodes would differ in size, or no op can have these sizes.
    """
    world_size, num_experts = options.world_size, model.num_experts + options.num_redundant_experts
    if options.data_parallel_size < 2:
        found = f"{options.data_parallel_size}, with which vLLM replicates tokens and adds up with an all-reduce"
        remedy = "Give the number that vLLM is started with."
        raise UnsupportedError("of at least 2", found, remedy, field="data_parallel_size")
    if options.num_redundant_experts and num_experts % world_size:
        expected = f"to make the experts a multiple of the {world_size} ranks, as vLLM's load balancer wants them"
        found = f"{model.num_experts} + {options.num_redundant_experts}"
        raise ConfigError(expected, found, "Change --num-redundant-experts.", field="num_redundant_experts")
    if world_size % options.node_size:
        raise ConfigError(
            f"to divide the {world_size} ranks: nodes are of one size",
            f"{options.node_size}{'' if options.gpus_per_node else ', the default'}",
            f"Say how many GPUs each node has, at most {world_size}.",
            field="gpus_per_node",
        )
    hidden_dim = options.hidden or model.hidden_dim
    num_tokens = options.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
    # Scales that are powers of two take as many bytes as others.
    wire = token_format_of(model.quantization.activations, hidden_dim, expects_unquantized=False, powers_of_two=False)
    between = {"gpu_per_node": options.node_size, "internode_transport": TRANSPORT} if options.num_nodes > 1 else {}
    return [
        config_from_handle_kwargs(
            between
            | handle_kwargs(
                wire if options.quant is None else TokenFormat(options.quant),
                LayerShape(
                    dtype=options.dtype or model.dtype,
                    hidden_dim=hidden_dim,
                    topk=model.topk,
                    num_experts=num_experts,
                    num_local_experts=num_owned_experts(num_experts, world_size, rank),
                    max_tokens=tokens_per_rank(num_tokens, options.sequence_parallel_size(model)),
                ),
                rank=rank,
                world_size=world_size,
            ),
            topology_internode=options.num_nodes > 1,
        )
        for rank in range(world_size)
    ]


def vllm_plan(model: MoeModel, options: VllmOptions) -> Plan:
    """Returns the plan of that op, which equals the engine's log; raises as vllm_configs."""
    return plan_of(vllm_configs(model, options), brings_own_rows=True)


def assumptions(model: MoeModel, options: VllmOptions, config: EpDispatchCombineConfig) -> list[str]:
    """Returns the plan's assumptions, one sentence each."""
    found = [_about_family(model)]
    if options.max_num_batched_tokens is None:
        default = f"--max-num-batched-tokens {DEFAULT_MAX_NUM_BATCHED_TOKENS}"
        found.append(f"{default}, vLLM's default for vllm serve on H100 and H200")
    if options.tensor_parallel_size > 1:
        shared = "tensor-parallel ranks share their replica's tokens; else --no-sequence-parallel"
        copied = "each tensor-parallel rank brings all tokens of its replica; else --sequence-parallel"
        found.append(shared if options.sequence_parallel_size(model) > 1 else copied)
    found += _about_experts(model, options, config)
    if model.quantization.name == "mxfp4" and config.hidden_dim % PADDED_MULTIPLE:
        padded = -(-config.hidden_dim // PADDED_MULTIPLE) * PADDED_MULTIPLE
        found.append(f"experts that take rows of {config.hidden_dim}; --hidden {padded} for Marlin's and TRTLLM's")
    found += _about_nodes(options)
    return [*found, "no second op, which a model with MoE layers of different shapes has"]


def _about_family(model: MoeModel) -> str:
    release, date = table().release, table().date
    if model.is_known:
        vllm = f"vLLM {release} (read on {date})"
        return f"hidden size, experts, top-k and shared tokens as the model files of {vllm} say"
    return (
        f"a guess: no model file of vLLM {release} is known for model_type {model.model_type!r}; "
        "hidden size, experts and top-k stand where other models have them. "
        "Compare them with the model's, and say --hidden or --sequence-parallel where they differ"
    )


def _about_experts(model: MoeModel, options: VllmOptions, config: EpDispatchCombineConfig) -> list[str]:
    """Says which experts take rows as they travel, and what to say for others."""
    if options.quant is not None:
        return []
    op, quantization = op_facts(config), model.quantization
    if op["quant"] != "none":
        others = f"--quant none for those that want {op['dtype']} (FlashInfer's CUTLASS, on Hopper)"
        return [f"experts that take rows cast by {op['quant']}; {others}"]
    if quantization.weights:
        text = f"{quantization.weights} experts that take {op['dtype']} (Marlin's, on Hopper)"
        cast, group_size = OTHER_CASTS.get(quantization.weights, ("", 1))
        is_possible = cast and config.hidden_dim % group_size == 0
        return [f"{text}; --quant {cast} for DeepGEMM's, on Blackwell" if is_possible else text]
    if quantization.name != "none":
        return [f"quantisation {quantization.name}: tokens travel as {op['dtype']}"]
    return []


def _about_nodes(options: VllmOptions) -> list[str]:
    """Says how many GPUs a node has, and what joins nodes."""
    else_say = "" if options.gpus_per_node else "; else --gpus-per-node"
    if options.num_nodes == 1:
        return [f"all {options.world_size} GPUs on one node (NVLink){else_say}"]
    return [
        f"{options.num_nodes} nodes with {options.node_size} of the {options.world_size} GPUs each{else_say}",
        f"nodes joined over {TRANSPORT}, which is EP_A2A_INTERNODE_TRANSPORT's default between hosts; "
        "NCCL's own buffers are not counted",
    ]
