"""Makes the report of a demo run: traffic, bytes, errors and times, from the ranks' results."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a import __version__
from ep_a2a.commands.demo.check import Comparison, compare, rows_by_source
from ep_a2a.commands.demo.model import INTERMEDIATE_DIM
from ep_a2a.commands.demo.settings import TOKEN_DTYPE
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.routing import traffic_matrix

if TYPE_CHECKING:
    from ep_a2a.commands.demo.model import DemoText
    from ep_a2a.commands.demo.settings import DemoSettings
    from ep_a2a.commands.demo.worker import PhaseSeconds, RankResult

POSITION_BYTES = 4
INDEX_BYTES = 4
WEIGHT_BYTES = 4


@dataclass(frozen=True)
class WireBytes:
    """Bytes that leave a rank for another one in a step, by direction and in all."""

    dispatch: int
    combine: int
    total: int


@dataclass(frozen=True)
class DemoReport:
    """Everything that `ep-a2a demo` prints; `--json` prints these fields.

    Attributes:
        matches: whether the run is right.
        text: where the tokens come from. tokens_available: words and marks in it.
        tokens_per_rank: tokens that each rank brings.
        ranks, ranks_asked_for: processes. device: "cpu" or "cuda". device_name: of rank 0's GPU.
        hidden_dim, intermediate_dim, experts, topk, quant_type: the layer.
        topology, backend, backend_reason, kernel, kernel_reason: the choices, and why.
        rows: rows sent, source by destination rank, each token once per rank that it is for.
        row_bytes_dispatch, row_bytes_combine: bytes of such a row in each direction.
        wire_bytes: between ranks, by the routing. wire_bytes_without_deduplication: with one copy per expert.
        wire_bytes_gathered: a lower bound for a backend that brings every token to every rank; None for others.
        comparison: with the dense model.
        seconds: per phase.
        versions: of this package and of what the ranks have loaded.
    """

    matches: bool
    text: str
    tokens_available: int
    tokens_per_rank: tuple[int, ...]
    ranks: int
    ranks_asked_for: int
    device: str
    device_name: str
    hidden_dim: int
    intermediate_dim: int
    experts: int
    topk: int
    quant_type: str
    topology: str
    backend: str
    backend_reason: str
    kernel: str
    kernel_reason: str
    rows: list[list[int]]
    row_bytes_dispatch: int
    row_bytes_combine: int
    wire_bytes: WireBytes
    wire_bytes_without_deduplication: WireBytes
    wire_bytes_gathered: WireBytes | None
    comparison: Comparison
    seconds: PhaseSeconds
    versions: dict[str, str]

    def as_json_object(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def make_report(
    settings: DemoSettings,
    text: DemoText,
    ranks_asked_for: int,
    results: list[RankResult],
    seconds: PhaseSeconds,
) -> DemoReport:
    """Makes the report of a run.

    Args:
        settings, text: of the run. ranks_asked_for: may be more than were run.
        results: of each rank.
        seconds: per phase.
    """
    ids = [result.ids for result in results]
    rows = rows_by_source(results, settings.num_experts)
    copies = traffic_matrix(ids, settings.num_experts, settings.num_ranks, deduplicate=False)
    gathered = torch.tensor(settings.tokens_per_rank)[:, None].expand_as(rows)
    comparison = compare(settings, results, rows)
    explained = results[0].explanation
    return DemoReport(
        matches=comparison.matches,
        text=text.source,
        tokens_available=text.num_available,
        tokens_per_rank=settings.tokens_per_rank,
        ranks=settings.num_ranks,
        ranks_asked_for=ranks_asked_for,
        device=settings.device,
        device_name=results[0].device_name,
        hidden_dim=settings.hidden_dim,
        intermediate_dim=INTERMEDIATE_DIM,
        experts=settings.num_experts,
        topk=settings.topk,
        quant_type=settings.quant_type,
        topology=explained["topology"],
        backend=explained["backend"],
        backend_reason=settings.backend_reason,
        kernel=explained["kernel"],
        kernel_reason=explained["kernel_reason"],
        rows=rows.tolist(),
        row_bytes_dispatch=dispatch_row_bytes(settings, settings.topk),
        row_bytes_combine=combine_row_bytes(settings),
        wire_bytes=wire_bytes(settings, rows, settings.topk),
        wire_bytes_without_deduplication=wire_bytes(settings, copies, 1),
        wire_bytes_gathered=(
            wire_bytes(settings, gathered, settings.topk) if results[0].gathers_all_tokens else None
        ),
        comparison=comparison,
        seconds=seconds,
        versions={"ep_a2a": __version__} | results[0].versions,
    )  # fmt: skip


def dispatch_row_bytes(settings: DemoSettings, num_slots: int) -> int:
    """Returns the bytes of a dispatched row: token, scales, `num_slots` ids and weights, position."""
    config = config_from_handle_kwargs(settings.handle_kwargs(0), topology_internode=False)
    token_bytes = config.hidden_dim * config.wire_dtype.itemsize
    scale_bytes = config.num_scales * config.scale_bytes
    return token_bytes + scale_bytes + num_slots * (INDEX_BYTES + WEIGHT_BYTES) + POSITION_BYTES


def combine_row_bytes(settings: DemoSettings) -> int:
    """Returns the bytes of a row on its way back."""
    return settings.hidden_dim * TOKEN_DTYPE.itemsize


def wire_bytes(settings: DemoSettings, rows: torch.Tensor, num_slots: int) -> WireBytes:
    """Returns the bytes between ranks for `rows` `[source, destination]`, each with `num_slots` expert ids."""
    num_remote = int(rows.sum() - rows.diagonal().sum())
    there, back = num_remote * dispatch_row_bytes(settings, num_slots), num_remote * combine_row_bytes(settings)
    return WireBytes(there, back, there + back)
