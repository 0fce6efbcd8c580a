"""Defines workloads, the points of a sweep: shapes, choices, seeded inputs of every rank, bytes on the wire."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from ep_a2a import config
from ep_a2a.commands.options import Quant, check_topk
from ep_a2a.errors import ConfigError, UnknownNameError
from ep_a2a.routing import ROUTINGS, num_distinct_ranks, traffic_matrix

INPUT_SCALE = 0.1
"""Standard deviation of the tokens' elements."""
CHOICES = {
    "quant": tuple(Quant),
    "combine_quant": config.COMBINE_QUANT_TYPES,
    "layout": tuple(config.Layout),
    "routing": ROUTINGS,
}
"""Values that a workload's field may have, where they are names."""
OF_LAYERS = {
    "layout": (config.Layout.RANK_MAJOR,),
    "quant": (config.QuantType.NONE, config.QuantType.FP8_PER_1X128),
    "combine_quant": (config.QuantType.NONE, config.QuantType.FP8_BLOCKWISE),
    "routing": ("uniform", "zipf", "all_to_one"),
    "gpus_per_node": (0,),
}
"""Values that the same fields may have in a layer."""
UNEVEN_SHARE = 128
"""A prompt of 8,192 tokens beside 64 sequences that decode."""
_MAX_CACHED_ROUTINGS = 4
BFLOAT16_BYTES, SCALE_BYTES = 2, 4


class Inputs(NamedTuple):
    """One rank's tokens.

    Attributes:
        x: `[T, H]` of the workload's dtype.
        ids: global expert ids, int32 `[T, K]`, -1 = dropped.
        weights: router weights, float32 `[T, K]`, each row with sum 1.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Workload:
    """One point of a sweep, the same on all ranks. Fields are named as the options of bench.

    Attributes:
        ranks: W, ranks.
        tokens: T, tokens of each rank, bfloat16; also what buffers are made for.
        hidden: H. topk: K. experts: experts over all ranks, owned linearly.
        quant: cast on the dispatch wire: "none", "fp8_per_1x128", "fp8_per_token" or "mxfp8".
        combine_quant: cast on the combine wire: "none", "fp8_blockwise" (1x128 scales) or "fp8_direct_cast".
        layout: how contenders that can choose arrange received rows.
        routing: a name in ep_a2a.routing.ROUTINGS.
        max_sms: bound on the multiprocessors of contenders that have one; 0 = none.
        gpus_per_node: ranks of each node, in ascending order of ranks; 0 = all ranks are on one.
        seed: of tokens, ids and weights.
        intermediate: F, intermediate size of an expert of a whole layer; 0 = dispatch and combine alone.
        uneven: whether rank 0 alone has T tokens, and each other rank the UNEVEN_SHARE-th part, at least one.
    """

    ranks: int
    tokens: int
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    quant: str = "none"
    combine_quant: str = "none"
    layout: str = "compact"
    routing: str = "uniform"
    max_sms: int = 0
    gpus_per_node: int = 0
    seed: int = 1234
    intermediate: int = 0
    uneven: bool = False

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        others = max(1, self.tokens // UNEVEN_SHARE) if self.uneven else self.tokens
        return self.tokens, *[others] * (self.ranks - 1)

    def inputs(self, rank: int, device: torch.device | str = "cpu") -> Inputs:
        """Returns the rank's tokens, ids and weights, drawn on the CPU to be equal on every machine."""
        generator = torch.Generator().manual_seed(self.seed_of(rank, "tokens"))
        num_tokens = self.counts[rank]
        x = torch.randn(num_tokens, self.hidden, generator=generator) * INPUT_SCALE
        weights = torch.rand(num_tokens, self.topk, generator=generator) + 1.0 / self.topk
        weights /= weights.sum(1, keepdim=True)
        return Inputs(x.bfloat16().to(device), self.ids(rank).to(device), weights.to(device))

    def ids(self, rank: int) -> torch.Tensor:
        """Returns a fresh tensor of the rank's expert ids, int32 `[T, K]` on the CPU."""
        return _all_ids(self)[rank].clone()

    def num_distinct_ranks(self, rank: int) -> torch.Tensor:
        """Returns the number of ranks that each of the rank's tokens goes to, int32 `[T]`."""
        return num_distinct_ranks(self.ids(rank), self.experts, self.ranks)

    def valid_weights(self, rank: int) -> torch.Tensor:
        """Returns the sum of the weights of each of the rank's tokens over its valid ids, float32 `[T]`."""
        inputs = self.inputs(rank)
        valid = (inputs.ids >= 0) & (inputs.ids < self.experts)
        return (inputs.weights * valid).sum(1)

    def traffic(self) -> torch.Tensor:
        """Returns the rows of dispatch by source and destination, int64 `[W, W]`, own ones included.

        A token is one row per distinct rank. Combine's matrix is the transpose.
        """
        return traffic_matrix(_all_ids(self), self.experts, self.ranks)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, of gpus_per_node ranks each."""
        return self.ranks // self.gpus_per_node if self.gpus_per_node else 1

    @property
    def dispatch_row_bytes(self) -> int:
        """Bytes of one token on the dispatch wire with its scales, without ids and weights."""
        return self._row_bytes(self.quant)

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of one row on the combine wire with its scales."""
        return self._row_bytes(self.combine_quant)

    @functools.cached_property
    def busiest_remote_rows(self) -> int:
        """The most rows that any rank sends to, or receives from, all others; one row per token and rank."""
        remote = self.traffic()
        remote.fill_diagonal_(0)
        return int(torch.maximum(remote.sum(0), remote.sum(1)).max())

    @property
    def tolerance(self) -> tuple[float, float]:
        """Allowed error of a round trip: relative to an element, and relative to the largest element of its row.

        The error is twice the rounding of each format that a row goes through: 8 bits for bf16, 4 for fp8.
        """
        relative, absolute = 2.0**-6, 0.0
        for cast in (self.quant, self.combine_quant):
            if cast != config.QuantType.NONE:
                relative += 2.0**-3
                # Subnormals: 2^-10 steps from 448 with a scale per row; without scales, from the row's own largest.
                absolute += 2.0**-7 if cast == config.QuantType.FP8_DIRECT_CAST else 2.0**-12
        return relative, absolute

    def as_row(self) -> dict[str, Any]:
        """Returns the fields for a report, numbers and text by name, with the bytes that the busiest rank must move."""
        rows = self.busiest_remote_rows
        moved = {"dispatch_bytes": rows * self.dispatch_row_bytes, "combine_bytes": rows * self.combine_row_bytes}
        return asdict(self) | moved | {"remote_rows": rows}

    def check(self) -> None:
        """Checks that something can move this.

        Raises:
            ConfigError, TopKError: nothing can; the text names the field.
        """
        casts = {self.quant, self.combine_quant}
        step = config.ALIGNMENT_BYTES // (BFLOAT16_BYTES if casts == {config.QuantType.NONE} else 1)
        step = max(config.GROUP_SIZES.get(config.QuantType(cast), step) for cast in casts)
        for name in ("ranks", "tokens", "hidden", "topk", "experts"):
            _require(getattr(self, name) >= 1, name, ">= 1", getattr(self, name))
        size = self.gpus_per_node
        _require(size == 0 or self.ranks % size == 0, "gpus_per_node", f"to divide {self.ranks} ranks", size)
        check_topk(self.topk, self.experts)
        expected = f"to be a multiple of {step} with these casts"
        _require(self.hidden % step == 0, "hidden", expected, self.hidden)
        if self.intermediate:
            self._check_layer()

    def _check_layer(self) -> None:
        for name, allowed in OF_LAYERS.items():
            got = getattr(self, name)
            _require(got in allowed, name, f"{' or '.join(map(str, allowed))} of a layer", got)
        for name, step in (("intermediate", 16), ("hidden", config.FP8_GROUP_SIZE)):
            _require(getattr(self, name) % step == 0, name, f"a multiple of {step} of a layer", getattr(self, name))
        most = config.num_owned_experts(self.experts, self.ranks, 0) if self.routing == "all_to_one" else self.experts
        _require(self.topk <= most, "topk", f"at most {most}, the experts of rank 0", self.topk)

    def _row_bytes(self, cast: str) -> int:
        if cast == config.QuantType.NONE:
            return self.hidden * BFLOAT16_BYTES
        by_groups = self.hidden // config.FP8_GROUP_SIZE * SCALE_BYTES
        other_casts = {
            config.QuantType.FP8_PER_TOKEN: SCALE_BYTES,
            config.QuantType.MXFP8: self.hidden // config.MX_GROUP_SIZE,
            config.QuantType.FP8_DIRECT_CAST: 0,
        }
        return self.hidden + other_casts.get(config.QuantType(cast), by_groups)

    def seed_of(self, rank: int, purpose: str) -> int:
        """Returns the seed of one rank's generator; `purpose` is "ids" or "tokens".

        Ids and tokens have generators of their own: every rank draws the ids of all, but only its own tokens.
        """
        return (self.seed * self.ranks + rank) * 2 + (purpose == "ids")


@functools.lru_cache(maxsize=_MAX_CACHED_ROUTINGS)
def _all_ids(workload: Workload) -> list[torch.Tensor]:
    draw, ids = ROUTINGS[workload.routing], []
    for rank in range(workload.ranks):
        generator = torch.Generator().manual_seed(workload.seed_of(rank, "ids"))
        drawn = draw(workload.counts[rank], workload.topk, workload.experts, workload.ranks, generator)
        ids.append(drawn.to(torch.int32).contiguous())
    return ids


def make_workloads(values: Mapping[str, Sequence[Any]]) -> list[Workload]:
    """Returns a workload for each combination of values; the last field varies fastest.

    Args:
        values: by field.

    Raises:
        ConfigError, TopKError, UnknownNameError: nothing can move a combination; the text names the field.
    """
    for field, allowed in CHOICES.items():
        for value in values.get(field, ()):
            if value not in allowed:
                raise UnknownNameError(f"to be one of {', '.join(map(str, allowed))}", repr(value), field=field)
    workloads = [Workload(**dict(zip(values, chosen))) for chosen in itertools.product(*values.values())]
    for workload in workloads:
        workload.check()
    return workloads


def _require(condition: bool, field: str, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(expected, str(got), field=field)
