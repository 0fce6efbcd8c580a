"""Times a first call with an empty Triton cache, and again in new processes that find it filled: a line of JSON each.

    python tools/cold_start.py --ranks 8                  # make_op and the first call of every form
    python tools/cold_start.py --ranks 2 --what vllm      # an op as vLLM's integration asks for it, and its first calls
    python tools/cold_start.py --what readme              # README's program, with its processes' start and imports
    python tools/cold_start.py --what vllm --each         # on stderr also where each kernel's seconds went
    python tools/cold_start.py --device cpu               # a smoke test in the interpreter, with small rows

Forms are round trips of SIZES tokens, with and without router weights, bounded by their size and by the op's limit,
eager and captured. Seconds are those of the slowest rank. `kernels` are those of one rank, `compiled` is summed over
ranks, which may compile the same kernel at the same time. Afterwards all forms, and those of OTHER_SIZES, are called
and captured once more: the script fails where that compiles or loads a kernel. Ranks share GPUs where there are fewer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

import ep_a2a  # noqa: E402
from ep_a2a.integrations.manager import EngineManager  # noqa: E402
from ep_a2a.integrations.token_format import LayerShape, TokenFormat  # noqa: E402
from ep_a2a.kernels.compiled_kernel import CompiledKernel  # noqa: E402
from ep_a2a.testing import RankContext, RankPool  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES, OTHER_SIZES = (0, 1, 64, 512, 4096), (2, 16, 17, 200, 2048)
"""Tokens of a rank: of first calls, and of calls that follow."""
CAST, NUM_EXPERTS, TOPK = "fp8_per_1x128", 256, 8


def sizes_on(device: torch.device) -> tuple[int, int]:
    """Hidden size and most tokens: DeepSeek-V3's; fewer in the interpreter."""
    return (128, 4) if device.type == "cpu" else (7168, max(SIZES))


def first_calls(context: RankContext, what: str, each: bool = False) -> dict[str, Any]:
    """Builds an op, makes its first calls, and makes them again. Collective. Returns this rank's figures.

    each: whether the first rank prints its kernels.
    """
    hits: list[bool] = []
    stages: dict[int, str] = {}

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)
        parts = [("source", times.ir_initialization), *times.lowering_stages]
        stages[threading.get_ident()] = ", ".join(f"{name} {us / 1e6:.2f}" for name, us in parts)

    triton.knobs.compilation.listener = listen
    # starts CUDA, and loads what draws and captures need
    call_all(context.device, lambda tokens, *_: tokens.zero_(), (1,))
    torch.distributed.all_reduce(torch.zeros(1), group=context.group)
    start = time.perf_counter()
    if each and context.rank == 0:
        CompiledKernel.build = timed(CompiledKernel.build, start, stages)
    step, close = {"forms": of_make_op, "vllm": of_vllm}[what](context)
    built = time.perf_counter()
    call_all(context.device, step, SIZES)
    called = time.perf_counter()
    found = {"build_secs": built - start, "calls_secs": called - built, "secs": called - start}
    found |= {"kernels": len(hits), "compiled": hits.count(False)}
    found["device"] = torch.cuda.get_device_name() if context.device.type == "cuda" else "interpreter"
    call_all(context.device, step, SIZES + OTHER_SIZES)
    if len(hits) > found["kernels"]:
        raise AssertionError("a call that was not the first of its form has compiled or loaded a kernel")
    close()
    return found


def timed(build: Callable[..., Any], start: float, stages: dict[int, str]) -> Callable[..., Any]:
    """CompiledKernel.build that prints when it began and ended, in seconds since `start`, and seconds of its stages.

    What the stages lack are Triton's keys, its launcher in C and the load onto the GPU. stages: by threads.
    """

    def timed_build(kernel: CompiledKernel) -> Any:
        began = time.perf_counter() - start
        built, ended = build(kernel), time.perf_counter() - start
        parts = stages.pop(threading.get_ident(), "in memory")
        sys.stderr.write(f"{began:6.2f} to {ended:6.2f} s: {kernel.name}: {parts}\n")
        return built

    return timed_build


def call_all(device: torch.device, step: Callable[..., Any], sizes: tuple[int, ...]) -> None:
    """Makes every call of `sizes` tokens, then captures all of them and replays the graph."""
    hidden_size, most = sizes_on(device)
    calls = []
    for size in dict.fromkeys(min(size, most) for size in sizes):
        tokens = torch.zeros(size, hidden_size, dtype=torch.bfloat16, device=device)
        weights, ids = torch.rand(size, NUM_EXPERTS, device=device).topk(TOPK)
        given = itertools.product((weights, None), (most, max(1, size)))
        calls += [(tokens, has_weights, ids.int(), bound) for has_weights, bound in given]
    for call in calls:
        step(*call)
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for call in calls:
                step(*call)
        graph.replay()
        torch.cuda.synchronize()


def of_make_op(context: RankContext) -> tuple[Callable[..., None], Callable[[], None]]:
    """A step of a new op of make_op, and what closes the op."""
    hidden_size, most = sizes_on(context.device)
    shape = {"hidden_size": hidden_size, "num_experts": NUM_EXPERTS, "topk": TOPK, "max_tokens": most}
    op = ep_a2a.make_op(context.group, **shape, quant=CAST, layout="rank_major", device=context.device)

    def step(tokens: torch.Tensor, weights: torch.Tensor | None, ids: torch.Tensor, bound: int) -> None:
        got = op.dispatch(tokens, weights, None, ids, step_tokens=bound)
        op.combine(torch.zeros_like(got.tokens, dtype=tokens.dtype), got.weights, ids if bound < most else None)

    return step, op.close


def of_vllm(context: RankContext) -> tuple[Callable[..., None], Callable[[], None]]:
    """A step of a MoE layer as vLLM's integration builds it, always with weights, and what ends its manager."""
    hidden_size, most = sizes_on(context.device)
    manager = EngineManager(context.group)
    manager.device = context.device
    layer = LayerShape(torch.bfloat16, hidden_size, TOPK, NUM_EXPERTS, NUM_EXPERTS // context.world_size, most)
    (dispatcher,) = manager.dispatchers("a layer", TokenFormat(CAST), layer)

    def step(tokens: torch.Tensor, weights: torch.Tensor | None, ids: torch.Tensor, bound: int) -> None:
        if weights is not None:
            got = dispatcher.dispatch(tokens, weights, ids, step_tokens=bound)
            dispatcher.combine(torch.zeros_like(got.tokens, dtype=tokens.dtype))

    return step, manager.destroy


def readme(num_ranks: int, device: str, folder: Path) -> dict[str, Any]:
    """Runs README's program, on GPUs with one for each rank."""
    num_ranks = min(num_ranks, torch.cuda.device_count() or num_ranks)
    (program,) = re.findall(r"```python\n(import torch\n.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    (folder / "program.py").write_text(program)
    start = time.perf_counter()
    subprocess.run([*launch, folder / "program.py"], check=True, stdout=sys.stderr, env=os.environ | hidden)
    return {"secs": time.perf_counter() - start, "ranks": num_ranks}


def main() -> None:
    """Measures with both caches, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("forms", "vllm", "readme"), default="forms")
    parser.add_argument("--ranks", type=int, default=2, help="they must divide 256 experts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--each", action="store_true", help="print the first rank's kernels; not of README's program")
    what, num_ranks, device, each = vars(parser.parse_args()).values()
    from tools import cold_start  # ranks import it by this name

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for cache in ("empty", "warm"):
            line = {"what": what, "cache": cache, "ranks": num_ranks, "triton": triton.__version__}
            if what == "readme":
                line |= readme(num_ranks, device, Path(folder))
            else:
                with RankPool(num_ranks, device=device, timeout_secs=600) as pool:
                    found = pool.run(cold_start.first_calls, what, each)
                line |= {key: max(rank[key] for rank in found) for key in found[0]}
                line["compiled"] = sum(rank["compiled"] for rank in found)
            print(json.dumps({key: round(value, 2) if key.endswith("secs") else value for key, value in line.items()}))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
