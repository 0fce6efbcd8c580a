"""What tests change in the workers of an engine, on CPU and on GPUs.

A worker is the engine's own process, or with tensor parallelism one of several that it starts. What is to be changed
travels in an environment variable; tests.engines.vllm.cpu.worker does it, in engines with EXTENSION for
`worker_extension_cls`.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "VLLM_ENGINE_TEST_CHANGES"
EXTENSION = "tests.engines.vllm.cpu.worker.WorkerExtension"


@dataclass(frozen=True)
class Changes:
    """Ranks are those of the expert-parallel group.

    Attributes:
        rank: that stops.
        stop_file: that makes it stop, as by SIGSTOP, in its next dispatch, or before its next replay of a CUDA graph,
            once it is there; which of them it was is written into it. "" = none.
        ranks_per_node: of virtual nodes; 0 = none.
        routed: folder for a file RANK.routed of each rank, with a line of JSON for each dispatch: the `ids` that it is
            given, the number of `rows` that experts get, and the bound of its waits, `timeout_secs`. A line null marks
            the end of warm-up. "" = none.
        batched: experts take rows by expert, by vLLM's reference of such experts, which it chooses for no platform.
        counts_splits: steps that vLLM splits, replays of graphs too, are counted in `split_steps`.
    """

    rank: int = 1
    stop_file: str = ""
    ranks_per_node: int = 0
    routed: str = ""
    batched: bool = False
    counts_splits: bool = False

    def variables(self) -> dict[str, str]:
        """For the environment of workers."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def sent(cls) -> Changes:
        """What this process has been sent."""
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))

    def make(self) -> None:
        """In this process, before its model is built."""
        if self.stop_file:
            stop_when_told(self.rank, Path(self.stop_file))
        if self.ranks_per_node:
            cut_nodes(self.ranks_per_node)
        if self.routed:
            record_routing(Path(self.routed))
        if self.batched:
            choose_batched_experts()
        if self.counts_splits:
            count_splits()


split_steps: list[int] = []
"""The tokens of each split step, padding included."""


def count_splits() -> None:
    """See `Changes.counts_splits`."""
    from vllm.forward_context import get_forward_context
    from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

    run = UBatchWrapper.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if slices := get_forward_context().ubatch_slices:
            split_steps.append(sum(each.num_tokens for each in slices))
        return run(self, *args, **kwargs)

    UBatchWrapper.__call__ = counted  # type: ignore[method-assign]


def record_routing(folder: Path) -> None:
    """See `Changes.routed`."""
    from ep_a2a.integrations.vllm.manager import VllmAll2AllManager
    from ep_a2a.ops.op import EpDispatchCombineOp

    dispatch, end_warm_up = EpDispatchCombineOp.dispatch, VllmAll2AllManager.end_warm_up

    def write(rank: int, line: Any) -> None:
        with (folder / f"{rank}.routed").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def recorded(self: Any, tokens: Any, weights: Any, scales: Any, ids: Any, **options: Any) -> Any:
        result = dispatch(self, tokens, weights, scales, ids, **options)
        rows, timeout_secs = result.indices[..., 0].numel(), self.memory.timeouts.step_secs
        write(self.config.rank, {"ids": ids.tolist(), "rows": rows, "timeout_secs": timeout_secs})
        return result

    def recorded_end(self: Any, timeout_secs: float) -> None:
        end_warm_up(self, timeout_secs)
        write(self.rank, None)

    EpDispatchCombineOp.dispatch = recorded  # type: ignore[method-assign]
    VllmAll2AllManager.end_warm_up = recorded_end  # type: ignore[method-assign]


def choose_batched_experts() -> None:
    """See `Changes.batched`."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    # it asks for a stream, which a CPU has not
    fused_batched_moe._is_capturing_or_compiling = lambda: False
    reference = fused_batched_moe.NaiveBatchedExperts
    answers = [name for name in vars(reference) if name.startswith("_supports_")]
    experts = type("Experts", (reference,), dict.fromkeys(answers, staticmethod(lambda *_: True)))
    unquantized.backend_to_kernel_cls = lambda _: [experts]
    chosen = property(lambda self: self.use_all2all_kernels)
    FusedMoEParallelConfig.use_batched_activation_format = chosen  # type: ignore[method-assign, assignment]


def stop_when_told(rank: int, file: Path) -> None:
    """See `Changes.stop_file`."""
    from torch.cuda import CUDAGraph
    from vllm.distributed.parallel_state import get_ep_group

    from ep_a2a.ops.op import EpDispatchCombineOp

    def stop_first(call: Any, name: str) -> Any:
        def stopped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if file.exists() and get_ep_group().rank_in_group == rank:
                file.write_text(name)
                os.kill(os.getpid(), signal.SIGSTOP)
            return call(self, *args, **kwargs)

        return stopped

    for owner, name in ((EpDispatchCombineOp, "dispatch"), (CUDAGraph, "replay")):
        setattr(owner, name, stop_first(getattr(owner, name), name))


def cut_nodes(ranks_per_node: int) -> None:
    """See `Changes.ranks_per_node`: every op is one for virtual nodes."""
    from ep_a2a.integrations.vllm.manager import VllmAll2AllManager

    get_handle = VllmAll2AllManager.get_handle

    def cut(self: Any, kwargs: Any, index: int = 0) -> Any:
        # with few channels between nodes, whose programs are interpreted one after another
        return get_handle(self, {"gpu_per_node": ranks_per_node, "launch": "manual", **kwargs}, index)

    VllmAll2AllManager.get_handle = cut  # type: ignore[method-assign]
