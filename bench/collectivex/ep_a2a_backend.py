"""ep_a2a as a backend of CollectiveX (experimental/CollectiveX of SemiAnalysisAI/InferenceX).

CollectiveX's bench/run_ep.py has a closed list of backends. This file takes its place, with the same arguments. A case
on CPU, where COLLECTIVEX is the folder experimental/CollectiveX of a checkout:

    ranks=2 mode=normal precision=fp8
    PYTHONPATH=$COLLECTIVEX/bench .venv/bin/torchrun --standalone --nproc-per-node $ranks \\
      bench/collectivex/ep_a2a_backend.py --backend ep-a2a --mode $mode --precision $precision --phase decode \\
      --routing uniform --hidden 256 --experts 16 --topk 4 --tokens-ladder "1 4" --seed 67 --version 1 \\
      --warmup 1 --iters 1 --trials 1 --chain-iters 3 --chain-trials 1 --chain-drop 1 \\
      --suite check --workload-name tiny --runner cpu --topology-class cpu --scope scale-up --transport shm \\
      --scale-up-transport shm --scale-out-transport "" --gpus-per-node $ranks --scale-up-domain $ranks \\
      --case-id cpu-ep-a2a-tiny-$mode-decode-ep$ranks-uniform-$precision --out result.json

Without a GPU it is a functional check: the host's clock stands in for CUDA events, so times say nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from types import SimpleNamespace
from typing import Any

import ep_harness
import torch
import torch.distributed as dist
from ep_backend import EPBackend

import ep_a2a
from ep_a2a.quantization import dequantize, quantize

FP8 = "fp8_per_1x128"
LAYOUTS = {"token-rank": "compact", "token-expert": "expert_major"}
"""ep_a2a's layout for each of CollectiveX's receive layouts."""
SEMANTICS = {"token-rank": "unweighted-rank-sum", "token-expert": "weighted-kernel-sum"}
"""Whether combine multiplies by the router's weights."""
DEFAULT_LAYOUT = {"normal": "token-rank", "low-latency": "token-expert"}
LOW_LATENCY_MAX_TOKENS = 256
"""Where the low-latency ladders of CollectiveX's own backends end."""


class EpA2ABackend(EPBackend):
    """One op for all points of a case. It chooses its kernels by the tokens of a step, in both modes."""

    name = "ep-a2a"
    maturity = "candidate"  # engines select it by ep_a2a's plugins, none by itself
    SUPPORTED_MODES = tuple(DEFAULT_LAYOUT)
    SUPPORTED_PRECISIONS = ("bf16", "fp8")
    requires_fresh_pair = True
    combine_reduction = "domain-fp32"
    library_version = ep_a2a.__version__

    def __init__(
        self, args: argparse.Namespace, rank: int, world_size: int, local_rank: int, device: torch.device
    ) -> None:
        super().__init__(args, rank, world_size, local_rank, device)
        # run_ep.py has no --receive-layout
        self.receive_layout = getattr(args, "receive_layout", None) or DEFAULT_LAYOUT[self.mode]
        self.combine_weight_semantics = SEMANTICS[self.receive_layout]
        self.kernel_generation = LAYOUTS[self.receive_layout]
        self.by_expert = self.receive_layout == "token-expert"
        self.experts_per_rank = args.experts // world_size
        self.is_fp8 = self.precision == "fp8"
        self.stage_device_work = self.is_fp8
        if self.is_fp8:
            self.dispatch_dtype = "fp8-e4m3fn"
            self.dispatch_value_bytes = 1
            self.dispatch_scale_bytes_per_copy = args.hidden // 128 * 4

    def buffer_cap(self, args: argparse.Namespace) -> int | None:
        """Returns the most tokens of a rank; longer ladders are cut."""
        return LOW_LATENCY_MAX_TOKENS if self.mode == "low-latency" else None

    def create_buffer(self, spec: Any) -> None:
        """Makes the op, with room for the longest point."""
        self.op = ep_a2a.make_op(
            hidden_size=self.args.hidden,
            num_experts=self.args.experts,
            topk=self.args.topk,
            max_tokens=spec.max_tokens_per_rank,
            quant=FP8 if self.is_fp8 else "none",
            layout=LAYOUTS[self.receive_layout],
            device=self.device,
        )

    def semantic_payload(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x as receivers see it: after the cast inside dispatch."""
        return dequantize(*quantize(x, FP8), FP8, x.dtype) if self.is_fp8 else x

    def _topk_idx_dtype(self) -> torch.dtype:
        return torch.int32

    def dispatch(self, problem: Any) -> SimpleNamespace:
        """Sends bf16 tokens; a cast to fp8 is inside the call."""
        received = self.op.dispatch(
            problem.dispatch_x, problem.topk_weights, None, problem.topk_idx, step_tokens=problem.T
        )
        return SimpleNamespace(received=received, combine_input=None)

    def stage(self, problem: Any, handle: Any) -> None:
        """Takes the received rows, as bf16, for the experts' results."""
        handle.combine_input = self._received_rows(handle)

    def _received_rows(self, handle: Any) -> torch.Tensor:
        tokens, scales = handle.received.tokens, handle.received.scales
        if not self.is_fp8:
            return tokens
        return dequantize(tokens.flatten(0, -2), scales.flatten(0, -2), FP8, torch.bfloat16).view(tokens.shape)

    def combine(self, problem: Any, handle: Any) -> torch.Tensor:
        """Returns the sums for this rank's tokens."""
        return self.op.combine(handle.combine_input, None, None).tokens[: problem.T]

    def recv_tokens(self, handle: Any) -> int:
        """Returns the rows received: of tokens, or in layout token-expert of their experts."""
        return int(self.op.expert_recv_count.sum() if self.by_expert else handle.received.total_recv)

    def inspect_dispatch(self, problem: Any, handle: Any) -> SimpleNamespace:
        """Returns the received rows for the oracle, without padding."""
        rows = self._received_rows(handle)
        counts = self.op.expert_recv_count[:, None] if self.by_expert else handle.received.total_recv
        handle.is_filled = torch.arange(rows.shape[-2], device=self.device) < counts
        payload = rows[handle.is_filled]
        first = self.rank * self.experts_per_rank
        if self.by_expert:
            expert_ids = first + handle.is_filled.nonzero()[:, 0]
            return SimpleNamespace(payload=payload, expert_ids=expert_ids, local_expert_counts=counts[:, 0].clone())
        # a row names all experts of its token
        ids = handle.received.indices[handle.is_filled].long()
        is_own = (ids >= first) & (ids < first + self.experts_per_rank)
        return SimpleNamespace(
            payload=payload,
            expert_ids=ids.masked_fill(~is_own, -1),
            weights=handle.received.weights[handle.is_filled].masked_fill(~is_own, 0),
            local_expert_counts=torch.bincount(ids[is_own] - first, minlength=self.experts_per_rank),
        )

    def combine_transformed(self, problem: Any, handle: Any, transformed: torch.Tensor) -> torch.Tensor:
        """Combines the oracle's rows, which have the order of inspect_dispatch's payload."""
        handle.combine_input = torch.zeros(handle.received.tokens.shape, dtype=torch.bfloat16, device=self.device)
        handle.combine_input[handle.is_filled] = transformed
        return self.combine(problem, handle)

    def finalize(self, rc: int) -> int:
        """Closes the op, then the process group."""
        if hasattr(self, "op"):
            self.op.close()
        return super().finalize(rc)


class HostEvent:
    """Stands in for torch.cuda.Event: on CPU the work of a call has ended when it returns."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.secs = 0.0

    def record(self) -> None:
        """Takes the time."""
        self.secs = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Returns milliseconds."""
        return (end.secs - self.secs) * 1000


def main() -> int:
    """Runs one case on the ranks that torchrun started."""
    parser = argparse.ArgumentParser(description="CollectiveX's EP benchmark over ep_a2a")
    parser.add_argument("--backend", required=True, choices=[EpA2ABackend.name])
    parser.add_argument(
        "--receive-layout",
        choices=list(LAYOUTS),
        help="token-rank: one row per token and rank, combine adds; token-expert: one per token and expert, combine "
        "multiplies by the router's weights (default: token-rank in mode normal, token-expert in low-latency)",
    )
    ep_harness.add_common_args(parser)
    args = parser.parse_args()
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        args.runtime_device_product = torch.cuda.get_device_name(device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
        args.runtime_device_product = "cpu"
        torch.cuda.Event, torch.cuda.synchronize = HostEvent, lambda: None
    args.runtime = {"framework": torch.__version__, "accelerator_runtime": torch.version.cuda}
    backend = EpA2ABackend(args, rank, world_size, local_rank, device)
    return backend.finalize(ep_harness.run_sweep(args, backend, torch, dist, device, rank, world_size))


if __name__ == "__main__":
    raise SystemExit(main())
