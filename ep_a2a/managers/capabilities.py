"""Capabilities: a backend's limits, declared on its manager, checked before an op is built and on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ep_a2a.config.enums import QuantType
from ep_a2a.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.managers.base import All2AllManagerBase

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
TOKEN_DTYPES = (*FLOAT_DTYPES, "float8_e4m3fn")
DISPATCH_CASTS = ("none", "fp8_per_token", "fp8_per_1x128", "mxfp8", "fp8_static")
SCALE_FORMATS = ("float32", "ue8m0", "float32_power_of_two")

USE, ROWS, DTYPES, SIZES, NEEDS, RUN = "use", "rows", "dtypes", "sizes", "needs", "run"
TABLES = {
    USE: "What it offers",
    ROWS: "What the experts get and give back",
    DTYPES: "Dtypes and casts",
    SIZES: "Sizes",
    NEEDS: "What it needs",
    RUN: "What was run",
}
"""Tables of `ep-a2a backends`, by their name in a field's metadata."""


def _in(table: str, title: str, default: Any) -> Any:
    return field(default=default, metadata={"table": table, "title": title})


@dataclass(frozen=True)
class Capabilities:
    """Abilities and limits of a backend. An empty tuple and 0 mean: any.

    Attributes:
        has_handles: `get_handle` returns ops with dispatch and combine.
        dispatches_tokens: the manager itself has dispatch and combine on hidden states.
        graph_safe: dispatch and combine can be captured in a CUDA graph.
        host_sync: a step of an op outside of graphs makes the host wait for the device.
        micro_batches: steps of ops with different indices may overlap.
        masks_ranks: on_rank_loss may be "mask".
        layouts: layouts of received rows.
        row_order: "source, token" is ascending by both; "source" by source rank only; "any" differs from run to run.
        packs_rows: step_tokens may have a bound for each rank; else one for all ranks.
        ids: "all": received rows carry all K ids and weights of their token; "local": those of this rank's experts, and
            pad_id and any weight in place of the others; "none": dispatch returns None for both.
        local_ids: the config's local_ids may be set.
        weights_applied_by: "experts", who return one weighted and added row per received row; "combine", which takes
            the rows of each expert as they are.
        dropped_slots: treatment of ids outside [0, num_experts). "yes": they are not sent; "weight 0": the token goes
            to another expert as well, which counts it, and combine multiplies that result by 0.
        recv_counts: received rows are counted by source.
        weight_sums: combine takes received weights and returns their sums.
        source_positions: whether get_dispatch_src_token_pos says where rows come from: "yes" or "no".
        token_dtypes, combine_dtypes: names of torch dtypes of the rows given to dispatch and to combine.
        dispatch_casts: dispatch_quant types it takes. cast: "inside" its kernels or "before" them, by torch.
        scale_formats: formats of the scales that a cast makes.
        scales_per_128: fp8 rows travel with one float32 scale per 128 elements, and with no others.
        scale_row_multiple: bytes of which a token's scales must be a multiple.
        combine_casts: combine_quant types it takes.
        combine_cast_dtypes: the only dtypes of rows that combine casts.
        combine_casts_between_nodes: whether combine casts where the group spans nodes, too.
        hidden_sizes: the only hidden sizes it has kernels for.
        hidden_multiple: hidden_dim must be a multiple of it.
        topks: the only numbers of experts per token.
        max_topk: the most experts per token.
        topk_within_experts: a token may not have more slots than there are experts.
        experts_multiple: the experts of all ranks must be a multiple of it.
        even_experts: every rank must own the same number of experts.
        rank_counts: the only numbers of ranks. max_ranks: the most, min_ranks the fewest.
        max_tokens: the most tokens of a rank, max_num_inp_token_per_rank.
        receive_cap: max_total_recv_tokens bounds its memory.
        gpus: makers of the GPUs it runs on.
        runs_on_cpu: it works on CPU tensors.
        single_node: all ranks must be on one node.
        rdma: "no", or "across nodes" where NICs must reach GPU memory.
        was_run: hardware that it has run on, or the check made instead.
        notes: further facts for users.
    """

    has_handles: bool = _in(USE, "ops", True)
    dispatches_tokens: bool = _in(USE, "manager moves tokens", False)
    graph_safe: bool = _in(USE, "CUDA graphs", True)
    host_sync: bool = _in(USE, "host waits", False)
    micro_batches: bool = _in(USE, "overlapping micro-batches", True)
    masks_ranks: bool = _in(USE, "goes on without lost ranks", False)
    layouts: tuple[str, ...] = _in(ROWS, "layouts", ("compact", "rank_major"))
    row_order: str = _in(ROWS, "order of rows", "source, token")
    packs_rows: bool = _in(ROWS, "a bound for each rank", False)
    ids: str = _in(ROWS, "ids and weights", "all")
    local_ids: bool = _in(ROWS, "local ids", False)
    weights_applied_by: str = _in(ROWS, "weights applied by", "experts")
    dropped_slots: str = _in(ROWS, "dropped slots", "yes")
    recv_counts: bool = _in(ROWS, "counts by source", True)
    weight_sums: bool = _in(ROWS, "sums of weights", True)
    source_positions: str = _in(ROWS, "source positions", "yes")
    token_dtypes: tuple[str, ...] = _in(DTYPES, "tokens", TOKEN_DTYPES)
    dispatch_casts: tuple[str, ...] = _in(DTYPES, "dispatch casts", DISPATCH_CASTS)
    cast: str = _in(DTYPES, "cast", "before")
    scale_formats: tuple[str, ...] = _in(DTYPES, "scales of a cast", SCALE_FORMATS)
    scales_per_128: bool = _in(DTYPES, "scales per 128 only", False)
    scale_row_multiple: int = _in(DTYPES, "bytes of scales multiple of", 0)
    combine_dtypes: tuple[str, ...] = _in(DTYPES, "combine", FLOAT_DTYPES)
    combine_casts: tuple[str, ...] = _in(DTYPES, "combine casts", ("none",))
    combine_cast_dtypes: tuple[str, ...] = _in(DTYPES, "combine casts of", ())
    combine_casts_between_nodes: bool = _in(DTYPES, "combine casts between nodes", True)
    hidden_sizes: tuple[int, ...] = _in(SIZES, "hidden sizes", ())
    hidden_multiple: int = _in(SIZES, "hidden multiple of", 0)
    topks: tuple[int, ...] = _in(SIZES, "experts per token", ())
    max_topk: int = _in(SIZES, "experts per token at most", 0)
    topk_within_experts: bool = _in(SIZES, "experts per token within all", False)
    experts_multiple: int = _in(SIZES, "experts multiple of", 0)
    even_experts: bool = _in(SIZES, "experts same on all ranks", False)
    max_tokens: int = _in(SIZES, "tokens per rank", 0)
    receive_cap: bool = _in(SIZES, "cap on received rows", False)
    gpus: tuple[str, ...] = _in(NEEDS, "GPUs", ("NVIDIA",))
    runs_on_cpu: bool = _in(NEEDS, "CPU", False)
    single_node: bool = _in(NEEDS, "one node only", False)
    rdma: str = _in(NEEDS, "RDMA", "no")
    rank_counts: tuple[int, ...] = _in(NEEDS, "numbers of ranks", ())
    min_ranks: int = _in(NEEDS, "ranks at least", 0)
    max_ranks: int = _in(NEEDS, "ranks at most", 0)
    was_run: str = _in(RUN, "was run", "")
    notes: tuple[str, ...] = _in(RUN, "notes", ())

    def refusal(
        self, backend: str, config: EpDispatchCombineConfig, num_nodes: int, index: int = 0
    ) -> UnsupportedError | None:
        """Returns why the backend cannot build an op of this config, or None. The same on all ranks.

        Args:
            backend: the backend's name, for the error.
            config: the config asked for.
            num_nodes: nodes of the group.
            index: the op's; others than 0 are for micro-batches whose steps overlap.
        """
        for expected, got, remedy in self._differences(config, num_nodes, index):
            return UnsupportedError(f"{expected}, which is what backend {backend!r} can do", got, remedy)
        return None

    def _differences(
        self, config: EpDispatchCombineConfig, num_nodes: int, index: int
    ) -> Iterator[tuple[str, str, str]]:
        """Yields (limit, request, remedy) for each request that the backend cannot serve."""
        casts_in_combine = config.combine_quant is not QuantType.NONE
        choices: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
            ("layout", self.layouts, str(config.layout)),
            ("tokens", self.token_dtypes, _name(config.data_type)),
            ("combine_dtype", self.combine_dtypes, _name(config.combined_dtype)),
            ("a cast of dispatch", self.dispatch_casts, config.dispatch_quant.value),
            ("a cast of combine", self.combine_casts, config.combine_quant.value),
            ("a cast of combine", self.combine_cast_dtypes if casts_in_combine else (), _name(config.combined_dtype)),
            ("hidden_dim", self.hidden_sizes, config.hidden_dim),
            ("num_experts_per_token", self.topks, config.topk),
            ("world_size", self.rank_counts, config.world_size),
        )
        for name, possible, asked in choices:
            if possible and asked not in possible:
                yield f"{name} out of {', '.join(map(str, possible))}", f"{name} {asked}", _use_another(name, possible)
        if config.casts_in_dispatch and config.scale_format not in self.scale_formats:
            names = ", ".join(self.scale_formats)
            yield f"scale_format out of {names}", str(config.scale_format), "Pass one of these, or use 'ep_a2a'."
        if self.scales_per_128 and config.wire_dtype.itemsize == 1:
            want, have = (config.hidden_dim // 128, 4), (config.num_scales, config.scale_bytes)
            if want != have:
                yield f"fp8 rows with (scale_dim, scale_type_size) = {want}", str(have), "Quantise per 1x128."
        bounds = (
            ("num_experts_per_token", self.max_topk, config.topk),
            ("world_size", self.max_ranks, config.world_size),
            ("max_num_inp_token_per_rank", self.max_tokens, config.max_num_inp_token_per_rank),
        )
        for name, most, asked in bounds:
            if most and asked > most:
                yield f"{name} of at most {most}", str(asked), f"Lower {name}, or use the backend 'ep_a2a'."
        if self.topk_within_experts and config.topk > config.total_experts:
            limit = f"num_experts_per_token of at most {config.total_experts}, as a token's experts must differ"
            yield limit, str(config.topk), "Use the backend 'ep_a2a'."
        if config.world_size < self.min_ranks:
            yield f"at least {self.min_ranks} ranks", str(config.world_size), "Use the backend 'ep_a2a'."
        multiples = (
            ("hidden_dim", self.hidden_multiple, config.hidden_dim),
            ("num_experts", self.experts_multiple, config.total_experts),
            ("num_experts", config.world_size if self.even_experts else 0, config.total_experts),
            ("bytes of a token's scales", self.scale_row_multiple, config.num_scales * config.scale_bytes),
        )
        for name, divisor, asked in multiples:
            if divisor and asked % divisor:
                yield f"{name} that is a multiple of {divisor}", str(asked), "Pad it, or use the backend 'ep_a2a'."
        if config.max_total_recv_tokens and not self.receive_cap:
            yield "no cap on received rows", f"max_total_recv_tokens {config.max_total_recv_tokens}", "Pass 0."
        if config.local_ids and not self.local_ids:
            yield "global ids", "local_ids=True", "Subtract the rank's first expert, or use the backend 'ep_a2a'."
        if config.masks and not self.masks_ranks:
            yield "on_rank_loss 'fail'", "'mask'", "Pass on_rank_loss='fail', or use the backend 'ep_a2a'."
        if casts_in_combine and num_nodes > 1 and not self.combine_casts_between_nodes:
            yield "a cast of combine on one node", f"{num_nodes} nodes", "Pass quant_type='none'."
        if index and not self.micro_batches:
            yield "index 0", f"index {index}", "Do not let steps of micro-batches overlap, or use the backend 'ep_a2a'."
        if self.single_node and num_nodes > 1:
            yield "ranks of one node", f"{num_nodes} nodes", "Use allgather_reducescatter across nodes, or 'ep_a2a'."

    def by_table(self, table: str) -> dict[str, Any]:
        """Returns the values of one of TABLES, by title."""
        return {
            each.metadata["title"]: getattr(self, each.name) for each in fields(self) if each.metadata["table"] == table
        }


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _use_another(name: str, possible: tuple[Any, ...]) -> str:
    if name == "layout":
        return f"Pass the handle kwarg layout={possible[0]!r}, or use the backend 'ep_a2a', which has all layouts."
    return "Change it, or use the backend 'ep_a2a'."


def device_problem(capabilities: Capabilities, device_type: str) -> str | None:
    """Returns why a backend cannot work on tensors of this device here, or None."""
    import torch  # here, so that the doctor reads capabilities where torch is broken

    from ep_a2a.memory.gpus import found_gpu, gpu_maker

    if device_type == "cpu":
        return None if capabilities.runs_on_cpu else f"does not run on CPU: needs {_gpus(capabilities)}"
    if not torch.cuda.is_available():
        return f"no GPU found: needs {_gpus(capabilities)}"
    if gpu_maker() in capabilities.gpus:
        return None
    notes = (note for note in capabilities.notes if note.startswith(f"{gpu_maker()} GPUs"))
    why = next(notes, "its kernels contain their instructions")
    return f"found {found_gpu()}: needs {_gpus(capabilities)} ({why})"


def problems(manager: type[All2AllManagerBase], device_type: str) -> tuple[str, ...]:
    """Returns every obstacle to a backend's use here, its library first; () without one. Imports the library.

    Args:
        manager: the backend's class.
        device_type: "cuda" or "cpu".
    """
    library = manager.library
    missing = None if library is None else library.problem()
    if missing is not None and library is not None:
        missing = f"{missing} ({library.install})"
    return tuple(filter(None, (missing, device_problem(manager.capabilities, device_type))))


def _gpus(capabilities: Capabilities) -> str:
    return f"{' or '.join(capabilities.gpus)} GPUs"
