"""Runs FlashInfer's one-sided all-to-all over NVLink (TensorRT-LLM's kernels), with experts' rows in its workspace.

The library's dispatch takes cast tokens: a round trip casts them once, untimed, when it is made.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.commands.bench.contenders import Contender, first_true, unavailable_on
from ep_a2a.commands.bench.layer import PAD_ID, CastLayer, Received
from ep_a2a.commands.measure.session import InputsRoundTrip
from ep_a2a.config import QuantType
from ep_a2a.managers.external.flashinfer import MAX_RANKS, TOPKS, NVLinkOneSided
from ep_a2a.quantization import quantize

if TYPE_CHECKING:
    from ep_a2a.commands.bench.layer import LayerWorkload
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext


class OneSidedExchange:
    """NVLinkOneSided for payloads at fixed addresses, with fixed views of what it receives and of the combine rows.

    dispatch and combine alternate and never wait on the host. All payloads and results keep their addresses, so a CUDA
    graph can capture both. Construction is collective.

    Args:
        payloads: named tensors `[T, n]` that travel with each token, rows of any number of bytes; among them "ids",
            global expert ids int32 `[T, K]`, none of them dropped.
        workload: T, the experts and the rows that combine sums. The workspace is sized for its max_num_tokens; each
            step is bounded to T, as engines bound it.
        context: this rank and its group.
        fp8_combine: cast combine rows to fp8 on the wire; they then lie outside the workspace and are staged.

    Attributes:
        combine_rows: `[W, max(T, 1), H]`, where the experts write; valid from the first dispatch on.
        received: the payloads as received, `[W, max(T, 1), n]` by name, of the payloads' dtypes.
    """

    def __init__(
        self, payloads: dict[str, torch.Tensor], workload: Workload, context: RankContext, *, fp8_combine: bool = False
    ) -> None:
        self._ids, self._fp8_combine = payloads["ids"], fp8_combine
        self._max_num_tokens = max(1, workload.num_tokens)
        hidden_dim, dtype, device = workload.hidden_dim, workload.dtype, self._ids.device
        self._native = NVLinkOneSided(
            {name: (each.shape[1], each.dtype) for name, each in payloads.items()},
            num_experts=workload.num_experts,
            topk=workload.topk,
            max_num_tokens=max(1, workload.max_num_tokens),
            combine_row_bytes=hidden_dim * dtype.itemsize,
            group=context.group,
            rank=context.rank,
            world_size=context.world_size,
        )
        self._payloads = self._native.packed(payloads)
        self._out = torch.empty(workload.num_tokens, hidden_dim, dtype=dtype, device=device)
        self.received = self.dispatch()
        if fp8_combine:
            lead = (context.world_size, self._max_num_tokens, hidden_dim)
            self.combine_rows = torch.zeros(lead, dtype=dtype, device=device)
        else:
            self.combine_rows = self._native.combine_rows(self._max_num_tokens, hidden_dim, dtype).zero_()
        self.combine()

    def dispatch(self) -> dict[str, torch.Tensor]:
        """Sends the payloads; returns them as received, at the same addresses every time."""
        return self._native.dispatch(self._ids, self._payloads, self._max_num_tokens)

    def mark_padding(self, name: str, pad_id: int) -> None:
        """Overwrites the int32 payload `name` with pad_id past the received rows; between dispatch and combine.

        Launches one small kernel on the current stream.
        """
        self._native.mark_padding(self.received[name], pad_id)

    def combine(self) -> torch.Tensor:
        """Sums `combine_rows` of the ranks that each token went to: `[T, H]`, at the same address every time."""
        return self._native.combine(
            self.combine_rows,
            self._max_num_tokens,
            self._out,
            in_workspace=not self._fp8_combine,
            fp8=self._fp8_combine,
        )

    def close(self) -> None:
        """Unmaps the workspace once no rank uses it. Collective."""
        self.received, self.combine_rows = {}, self._out
        self._native.close()


class FlashInferRoundTrip(InputsRoundTrip):
    """The exchange with one workload's inputs."""

    def __init__(self, workload: Workload, context: RankContext) -> None:
        super().__init__(workload, context)
        payloads = {"x": self._x, "ids": self._ids, "weights": self._weights}
        if workload.quant_type != QuantType.NONE:
            payloads["x"], payloads["scales"] = quantize(self._x, workload.quant_type)
        fp8_combine = workload.combine_quant == QuantType.FP8_DIRECT_CAST
        self._exchange = OneSidedExchange(payloads, workload, context, fp8_combine=fp8_combine)
        self._exchange.combine_rows.normal_(std=0.1)
        self.details = {
            "version": importlib.metadata.version("flashinfer-python"),
            "combine": "staged" if fp8_combine else "zero-copy",
            "dispatch": "tokens as they are" if workload.quant_type == QuantType.NONE else "tokens cast before",
        }

    def dispatch(self) -> dict[str, torch.Tensor]:
        """Sends tokens, scales, ids and router weights to the experts' ranks."""
        return self._exchange.dispatch()

    def combine(self, dispatched: Any) -> torch.Tensor:
        """Combines the experts' rows, which lie ready."""
        return self._exchange.combine()

    def check(self) -> None:
        """Checks a round trip through identity experts, which write where they will be timed."""
        received = self.dispatch()
        # Rows past the received ones may hold anything.
        self._exchange.combine_rows.copy_(self._rows_of(received["x"], received.get("scales")))
        self._check_result(self.combine(received))

    def close(self) -> None:
        """Unmaps the workspace. Collective."""
        self._exchange.close()


class FlashInferLayer(CastLayer):
    """A layer over the exchange, with a cast before dispatch, and a launch after it that marks padding."""

    def __init__(self, workload: LayerWorkload, context: RankContext) -> None:
        super().__init__(workload, context)
        payloads = {"x": self._tokens, "ids": self.gate.ids, "weights": self.gate.weights}
        if self._scales is not None:
            payloads["scales"] = self._scales
        self._exchange = OneSidedExchange(payloads, workload, context)

    def dispatch(self) -> Received:
        """Sends tokens, ids and router weights to the experts' ranks."""
        self._cast()
        received = self._exchange.dispatch()
        self._exchange.mark_padding("ids", PAD_ID)
        flat = {name: each.flatten(0, 1) for name, each in received.items()}
        rows = self._exchange.combine_rows.flatten(0, 1)
        return Received(flat["x"], flat.get("scales"), flat["ids"], flat["weights"], rows)

    def combine(self) -> torch.Tensor:
        """Brings the experts' rows back, summed."""
        return self._exchange.combine()

    def close(self) -> None:
        """Unmaps the workspace. Collective."""
        self._exchange.close()


def unavailable(workload: Workload, device: torch.device) -> str | None:
    """Returns why FlashInfer cannot run this workload here; None where it can."""
    install = "is not installed: pip install flashinfer-python"
    packages = {"flashinfer": f"flashinfer-python {install}", "tvm_ffi": f"apache-tvm-ffi {install}"}
    return unavailable_on(device, packages) or refusal(workload)


def refusal(workload: Workload) -> str | None:
    """Returns why the library cannot run the workload, or None."""
    ids = torch.cat([workload.ids(rank) for rank in range(workload.world_size)])
    casts_back = workload.combine_quant != QuantType.NONE
    has_experts = workload.world_size <= min(MAX_RANKS, workload.num_experts)
    return first_true(
        {
            f"supports top-k {TOPKS}, not {workload.topk}": workload.topk not in TOPKS,
            f"needs at most {MAX_RANKS} ranks and an expert on each": not has_experts,
            "its fp8 combine wire has no scales: fp8_direct_cast": workload.combine_quant == QuantType.FP8_BLOCKWISE,
            "its fp8 combine wire is for bfloat16 rows": casts_back and workload.dtype != torch.bfloat16,
            "sends dropped slots to rank 0": bool(((ids < 0) | (ids >= workload.num_experts)).any()),
        }
    )


CONTENDERS = (Contender("flashinfer", FlashInferRoundTrip, FlashInferLayer, unavailable),)
"""`flashinfer.comm`'s MoeAlltoAll: dispatch pushes each token once per distinct rank, combine pulls.

Rows arrive in layout rank_major in no particular order. Combine is zero-copy; with an fp8 combine wire
(fp8_direct_cast, no scales) it is staged, since the cast in place would destroy the rows.
"""
