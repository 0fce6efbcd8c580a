"""Runs the demo: the ranks, the comparison with a dense model in one process, the report."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ep_a2a.commands import messages
from ep_a2a.commands.demo.model import INTERMEDIATE_DIM, SEED, embed, expert_weights, route, words_from
from ep_a2a.commands.demo.view import show_report
from ep_a2a.commands.files import give_json
from ep_a2a.commands.options import check_topk
from ep_a2a.commands.ranks import call_ranks, joined_pool
from ep_a2a.config import FP8_DTYPE, num_owned_experts
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.interface import DispatchResult
from ep_a2a.managers.collective import CollectiveAll2AllManager
from ep_a2a.managers.registry import manager_type
from ep_a2a.parallel.state import destroy_dist_env, get_ep_group, init_dist_env
from ep_a2a.quantization import dequantize, quantize
from ep_a2a.reference import dense_moe
from ep_a2a.routing import expert_ranges, owner_of_experts, traffic_matrix
from ep_a2a.testing.worker import RankContext

TOKEN_DTYPE = torch.bfloat16
"""Dtype of the model's activations: of dispatch's input and of the rows that combine sums."""
WAIT_SECS = 120.0
"""Bound of a wait for other ranks: the interpreter is slow, and ranks have different numbers of tokens."""
NUM_STEPS = 2
"""Steps of a run, with equal tokens; the last one is compared. A second step finds memory that the first one spoilt."""
BFLOAT16_ROUNDOFF = 2.0**-8
"""Largest relative error of rounding to bfloat16, which keeps 8 significant bits."""
FLOAT32_NOISE = 2.0**-16
"""Bound, relative to a row's largest element, of the effect of another order of float32 sums."""


@dataclass(frozen=True)
class DemoSettings:
    """Sizes and choices of a run, equal in the command's process and on all ranks.

    Attributes:
        ranks: processes. device: "cpu" or "cuda".
        tokens: tokens over all ranks.
        hidden, experts, topk: of the MoE layer.
        quant: cast inside dispatch: "none", "fp8_per_token", "fp8_per_1x128" or "mxfp8".
        gpus_per_node: ranks of a virtual node; None goes by the machine.
        backend: name of the all-to-all backend. backend_reason: who chose it.
        seed: of the model's weights and the tokens' vectors.
    """

    ranks: int = 4
    device: str = "cpu"
    tokens: int = 96
    hidden: int = 256
    experts: int = 16
    topk: int = 4
    quant: str = "none"
    gpus_per_node: int | None = None
    backend: str = "ep_a2a"
    backend_reason: str = "the default"
    seed: int = SEED

    @property
    def tokens_per_rank(self) -> tuple[int, ...]:
        """Tokens of each rank, unequal on purpose: rank r brings about r + 1 shares."""
        ends = [self.tokens * r * (r + 1) // (self.ranks * (self.ranks + 1)) for r in range(self.ranks)]
        return tuple(end - start for start, end in zip(ends, [*ends[1:], self.tokens]))

    def handle_kwargs(self, rank: int) -> dict[str, Any]:
        """Returns the arguments of a rank for its manager's `get_handle`."""
        kwargs: dict[str, Any] = {
            "rank": rank,
            "num_ep_ranks": self.ranks,
            "input_dtype": TOKEN_DTYPE,
            "quant_dtype": TOKEN_DTYPE if self.quant == "none" else FP8_DTYPE,
            "token_hidden_size": self.hidden,
            "max_num_tokens_per_dp_rank": max(self.tokens_per_rank),
            "num_local_experts": num_owned_experts(self.experts, self.ranks, rank),
            "num_experts": self.experts,
            "num_experts_per_token": self.topk,
            "quant_type": self.quant,
            "timeout_secs": WAIT_SECS,
        }
        return kwargs if self.gpus_per_node is None else kwargs | {"gpu_per_node": self.gpus_per_node}

    def check(self) -> None:
        """Checks the settings before processes are started.

        Raises:
            TopKError: topk exceeds the experts.
            ConfigError: a size that no op can have.
        """
        check_topk(self.topk, self.experts)
        config_from_handle_kwargs(self.handle_kwargs(0), topology_internode=False)


@dataclass(frozen=True)
class RankResult:
    """Result of a rank after its last step.

    Attributes:
        tokens: its embedded tokens `[T, H]`. weights, ids: their routing, `[T, K]`.
        output: what combine returned for them, `[T, H]`.
        rows_received: rows from each rank in the last step.
        explained: what its manager says of itself.
    """

    tokens: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    output: torch.Tensor
    rows_received: list[int]
    explained: dict[str, str]


def execute(settings: DemoSettings, options: SimpleNamespace) -> int:
    """Runs the demo, prints its report and returns the exit code.

    Args:
        settings: sizes and choices.
        options: what to print and write, by name, as cli/demo.py declares them.
    """
    settings.check()
    # On stderr, whose ends the ranks share; shown only to somebody who watches both.
    progress = messages.notices()
    progress.quiet |= options.as_json or not (progress.is_interactive and sys.stdout.isatty())
    with progress.status(f"starting {settings.ranks} processes") as status:
        with joined_pool(settings.ranks, settings.device) as pool:
            status.update(f"{NUM_STEPS} steps of dispatch, experts, combine")
            results = call_ranks(pool, run_rank, settings)
        status.update("comparing with the dense layer")
        report = make_report(settings, pool.note, results)
    give_json(report, options.output, as_json=options.as_json)
    if not options.as_json:
        show_report(messages.output(), report, verbose=options.verbose)
    return messages.EXIT_OK if report["matches"] else messages.EXIT_MISMATCH


def run_rank(context: RankContext, settings: DemoSettings) -> RankResult:
    """Runs NUM_STEPS steps of the layer on this rank. Collective."""
    rank, device = context.rank, context.device
    init_dist_env(
        1,
        0,
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        local_rank=rank,
        data_parallel_size=context.world_size,
        data_parallel_rank=rank,
        all2all_backend=settings.backend,
    )
    manager = get_ep_group().device_communicator.all2all_manager
    kwargs = settings.handle_kwargs(rank)
    op = manager.get_handle(kwargs)
    first = sum(settings.tokens_per_rank[:rank])
    tokens = embed(words_from(first, settings.tokens_per_rank[rank]), first, settings.hidden, settings.seed).to(device)
    weights, ids = route(tokens, settings.experts, settings.topk, settings.seed)
    experts = range(*expert_ranges(settings.experts, settings.ranks)[rank])
    projections = [each.to(device) for each in expert_weights(experts, settings.hidden, settings.seed)]
    for _ in range(NUM_STEPS):
        received = op.dispatch(tokens, weights, None, ids)
        rows, row_weights, row_ids = _valid_rows(received, settings.quant)
        returned = op.get_registered_combine_input_buffer(TOKEN_DTYPE, settings.hidden)
        returned[: rows.shape[0]] = dense_moe(rows, row_weights, row_ids - experts.start, *projections)
        # Combine sums rows unweighted, so no weights travel back.
        output, _ = op.combine(returned, None, ids)
    explained = manager.explain(settings.gpus_per_node, kwargs["max_num_tokens_per_dp_rank"])
    # The op's memory ends with the group, so the output is copied.
    output = output[: tokens.shape[0]].clone()
    result = RankResult(tokens, weights, ids, output, op.recv_counts.tolist(), explained)
    destroy_dist_env()
    return result


def _valid_rows(received: DispatchResult, quant_type: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the received tokens without the cast, their weights and ids."""
    rows, weights, scales, ids, total_recv = received
    valid = slice(int(total_recv))
    assert weights is not None
    uncast = rows[valid] if scales is None else dequantize(rows[valid], scales[valid], quant_type)
    return uncast, weights[valid], ids[valid]


def compare(settings: DemoSettings, results: list[RankResult], *, rows_as_routed: bool) -> dict[str, Any]:
    """Compares the ranks' output with a dense model that sees the whole batch in one process.

    The dense model gets the experts' input: with a cast, the tokens cast to fp8 and back, bit for bit. Both compute
    in float32, so they differ by bfloat16 roundings only: each rank's partial sum y_r is rounded once, and so is their
    sum. Hence |error| <= u * sum |y_r| + u * (|y| + u * sum |y_r|), u = 2^-8, plus float32 noise.
    Across nodes the sum of each node is rounded in between: u * sum |y_r| more.

    Args:
        settings, results: of the run.
        rows_as_routed: whether each rank received from each rank as many rows as the routing says.

    Returns:
        max_error: largest absolute difference. tolerance: the bound that holds for that very element.
        worst_share: the largest difference in shares of its own element's bound; a mismatch above 1.
        max_output: largest magnitude of the dense model's output.
        rows_as_routed: as given.
        matches: whether rows are as routed and every element is within its bound.
    """
    tokens, weights, ids, output = (
        torch.cat([getattr(result, name) for result in results]) for name in ("tokens", "weights", "ids", "output")
    )
    projections = expert_weights(range(settings.experts), settings.hidden, settings.seed)
    seen = tokens.to(torch.float32)
    if settings.quant != "none":
        seen = dequantize(*quantize(tokens, settings.quant), settings.quant)
    expected = dense_moe(seen, weights, ids, *projections)

    owners = owner_of_experts(ids, settings.experts, settings.ranks)
    partial = torch.zeros_like(expected)
    for rank in range(settings.ranks):
        partial += dense_moe(seen, weights, torch.where(owners == rank, ids, -1), *projections).abs()
    bound = BFLOAT16_ROUNDOFF * (partial + expected.abs() + BFLOAT16_ROUNDOFF * partial)
    if settings.gpus_per_node is not None and settings.gpus_per_node < settings.ranks:
        bound += BFLOAT16_ROUNDOFF * partial
    bound += FLOAT32_NOISE * partial.amax(dim=1, keepdim=True)
    # NaN counts as the largest number: it must not compare as equal, and JSON knows neither NaN nor infinity.
    error = (output.to(torch.float32) - expected).abs().nan_to_num(nan=torch.finfo(torch.float32).max)
    worst = int(error.argmax())
    return {
        "max_error": float(error.flatten()[worst]),
        "tolerance": float(bound.flatten()[worst]),
        "worst_share": float((error / bound).nan_to_num().max()),
        "max_output": float(expected.abs().max()),
        "rows_as_routed": rows_as_routed,
        "matches": rows_as_routed and bool((error <= bound).all()),
    }


def make_report(settings: DemoSettings, note: str, results: list[RankResult]) -> dict[str, Any]:
    """Returns everything that `ep-a2a demo` prints, as plain values; `--json` prints it as it is.

    Keys:
        matches: whether the run is right.
        tokens_per_rank: tokens that each rank brings.
        ranks: processes. note: what times say where they share GPUs, else "".
        device: "cpu" or "cuda".
        hidden_dim, intermediate_dim, experts, topk, quant_type: the layer.
        topology, backend, backend_reason, kernel, kernel_reason: the choices, and why.
        rows: rows sent, source by destination rank, each token once per rank that it is for.
        rows_without_deduplication: the same with one copy for each expert.
        gathers: whether the backend brings all tokens to all ranks, whatever the routing.
        comparison: with the dense model; see `compare`.

    Args:
        settings: of the run. note: as above.
        results: of each rank.
    """
    routing = ([result.ids for result in results], settings.experts, settings.ranks)
    rows = torch.tensor([result.rows_received for result in results]).T
    comparison = compare(settings, results, rows_as_routed=torch.equal(rows, traffic_matrix(*routing)))
    manager = manager_type(settings.backend)
    return {
        "matches": comparison["matches"],
        **results[0].explained,
        "tokens_per_rank": settings.tokens_per_rank,
        "ranks": settings.ranks,
        "note": note,
        "device": settings.device,
        "hidden_dim": settings.hidden,
        "intermediate_dim": INTERMEDIATE_DIM,
        "experts": settings.experts,
        "topk": settings.topk,
        "quant_type": settings.quant,
        "backend_reason": settings.backend_reason,
        "rows": rows.tolist(),
        "rows_without_deduplication": traffic_matrix(*routing, deduplicate=False).tolist(),
        "gathers": manager is not None and issubclass(manager, CollectiveAll2AllManager),
        "comparison": comparison,
    }
