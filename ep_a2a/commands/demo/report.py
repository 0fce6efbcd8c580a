"""Makes the report of a demo run: traffic, bytes, errors and times, from the ranks' results."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a import __version__
from ep_a2a.commands.demo.check import compare
from ep_a2a.commands.demo.model import INTERMEDIATE_DIM
from ep_a2a.commands.demo.settings import TOKEN_DTYPE
from ep_a2a.commands.demo.worker import PHASES
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.routing import traffic_matrix

if TYPE_CHECKING:
    from ep_a2a.commands.demo.model import DemoText
    from ep_a2a.commands.demo.settings import DemoSettings
    from ep_a2a.commands.demo.worker import RankResult

POSITION_BYTES = 4
INDEX_BYTES = 4
WEIGHT_BYTES = 4


def make_report(settings: DemoSettings, text: DemoText, note: str, results: list[RankResult]) -> dict[str, Any]:
    """Returns everything that `ep-a2a demo` prints, as plain values; `--json` prints it as it is.

    Keys:
        matches: whether the run is right.
        text: where the tokens come from. tokens_available: words and marks in it.
        tokens_per_rank: tokens that each rank brings.
        ranks: processes. note: what times say where they share GPUs, else "".
        device: "cpu" or "cuda". device_name: of rank 0's GPU.
        hidden_dim, intermediate_dim, experts, topk, quant_type: the layer.
        topology, backend, backend_reason, kernel, kernel_reason: the choices, and why.
        rows: rows sent, source by destination rank, each token once per rank that it is for.
        row_bytes_dispatch, row_bytes_combine: bytes of such a row in each direction.
        wire_bytes: between ranks, by the routing. wire_bytes_without_deduplication: with one copy per expert.
        wire_bytes_gathered: a lower bound for a backend that brings every token to every rank; None for others.
        comparison: with the dense model; see check.compare.
        seconds: per phase, of its slowest rank, the median over the timed steps; None on CPU, whose times say nothing.
        versions: of this package and of what the ranks have loaded.

    Args:
        settings, text: of the run. note: as above.
        results: of each rank.
    """
    routing = ([result.ids for result in results], settings.num_experts, settings.num_ranks)
    rows = torch.tensor([result.rows_received for result in results]).T
    comparison = compare(settings, results, rows_as_routed=torch.equal(rows, traffic_matrix(*routing)))
    first = results[0]
    return {
        "matches": comparison["matches"],
        "text": text.source,
        "tokens_available": text.num_available,
        "tokens_per_rank": settings.tokens_per_rank,
        "ranks": settings.num_ranks,
        "note": note,
        "device": settings.device,
        "device_name": first.device_name,
        **_layer(settings),
        **_choices(settings, first),
        **_traffic(settings, rows, traffic_matrix(*routing, deduplicate=False), gathers=first.gathers_all_tokens),
        "comparison": comparison,
        "seconds": None if settings.device == "cpu" else _seconds(results),
        "versions": {"ep_a2a": __version__} | first.versions,
    }


def _layer(settings: DemoSettings) -> dict[str, Any]:
    return {
        "hidden_dim": settings.hidden_dim,
        "intermediate_dim": INTERMEDIATE_DIM,
        "experts": settings.num_experts,
        "topk": settings.topk,
        "quant_type": settings.quant_type,
    }


def _choices(settings: DemoSettings, result: RankResult) -> dict[str, str]:
    explained = {name: result.explanation[name] for name in ("topology", "backend", "kernel", "kernel_reason")}
    return explained | {"backend_reason": settings.backend_reason}


def _traffic(settings: DemoSettings, rows: torch.Tensor, copies: torch.Tensor, *, gathers: bool) -> dict[str, Any]:
    """Returns rows and bytes; `copies` are the rows without deduplication, `[source, destination]` as `rows`."""
    gathered = torch.tensor(settings.tokens_per_rank)[:, None].expand_as(rows)
    return {
        "rows": rows.tolist(),
        "row_bytes_dispatch": dispatch_row_bytes(settings, settings.topk),
        "row_bytes_combine": combine_row_bytes(settings),
        "wire_bytes": wire_bytes(settings, rows, settings.topk),
        "wire_bytes_without_deduplication": wire_bytes(settings, copies, 1),
        "wire_bytes_gathered": wire_bytes(settings, gathered, settings.topk) if gathers else None,
    }


def _seconds(results: list[RankResult]) -> dict[str, float]:
    """Returns the median over the steps of each phase's slowest rank."""
    steps = list(zip(*(result.seconds for result in results)))
    return {
        name: statistics.median(max(rank[phase] for rank in step) for step in steps)
        for phase, name in enumerate(PHASES)
    }


def dispatch_row_bytes(settings: DemoSettings, num_slots: int) -> int:
    """Returns the bytes of a dispatched row: token, scales, `num_slots` ids and weights, position."""
    config = config_from_handle_kwargs(settings.handle_kwargs(0), topology_internode=False)
    token_bytes = config.hidden_dim * config.wire_dtype.itemsize
    scale_bytes = config.num_scales * config.scale_bytes
    return token_bytes + scale_bytes + num_slots * (INDEX_BYTES + WEIGHT_BYTES) + POSITION_BYTES


def combine_row_bytes(settings: DemoSettings) -> int:
    """Returns the bytes of a row on its way back."""
    return settings.hidden_dim * TOKEN_DTYPE.itemsize


def wire_bytes(settings: DemoSettings, rows: torch.Tensor, num_slots: int) -> dict[str, int]:
    """Returns the bytes between ranks for `rows` `[source, destination]`, each with `num_slots` expert ids."""
    num_remote = int(rows.sum() - rows.diagonal().sum())
    there, back = num_remote * dispatch_row_bytes(settings, num_slots), num_remote * combine_row_bytes(settings)
    return {"dispatch": there, "combine": back, "total": there + back}
