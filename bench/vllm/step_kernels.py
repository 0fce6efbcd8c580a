"""The kernels of one prefill and one decode step of a real vLLM engine on GPUs, between the gate and the next norm.

    python -m bench.vllm.step_kernels --ranks 2 --layers 2 --backends ep_a2a,allgather_reducescatter

A backend is named as in throughput.py. Each engine runs DeepSeek-V3's shape with fp8 experts and dummy weights. torch's
profiler records one step of `--batch` prompts per rank, and the decode steps behind it. For each backend and step a
table lists the kernels of the first layer in the order in which they begin: microseconds, stream, name. A kernel that
waits for another rank lasts as long as it waits. The traces stay in `--folder`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.vllm.throughput import parse_backend
from tests.engines.vllm.gpu.engine import arguments, run_engine
from tests.engines.vllm.models import SHAPES, quantized, save_config

NUM_DECODE_STEPS = 5
LONGEST_NAME = 100
KINDS, MARK = ("kernel", "gpu_memcpy", "gpu_memset"), "gpu_user_annotation"
VARIABLES = {
    # the function that fills the weights travels to the workers
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    # it compiles a kernel for each number of rows when an engine starts
    "VLLM_USE_DEEP_GEMM": "0",
}


def main() -> None:
    """Run all engines at once and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks, one GPU each")
    parser.add_argument("--layers", type=int, default=2, help="all of them with experts")
    parser.add_argument("--backends", default="ep_a2a,allgather_reducescatter", help="comma-separated")
    parser.add_argument("--batch", type=int, default=64, help="sequences per rank")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each")
    parser.add_argument("--engine", default={}, type=json.loads, help="JSON: more arguments of vllm.LLM")
    parser.add_argument("--limit", type=float, default=600, help="seconds for all engines")
    parser.add_argument("--folder", type=Path, default=Path("step_kernels"), help="that is made, for logs and traces")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True)
    backends = options.backends.split(",")
    with ThreadPoolExecutor(len(backends)) as pool:
        runs = pool.map(lambda place: profiled(options, backends, place), range(len(backends)))
        for backend, text in zip(backends, runs, strict=True):
            sys.stdout.write(f"## {backend}\n\n{text}\n")
            sys.stdout.flush()


def profiled(options: argparse.Namespace, backends: list[str], place: int) -> str:
    """Runs one engine; returns its tables, or why there are none."""
    name, own_arguments, variables = parse_backend(backends[place])
    folder = options.folder / backends[place].replace(":", "-")
    config = quantized(SHAPES["deepseek_v3"] | {"num_hidden_layers": options.layers})
    traces = folder / "traces"
    engine = arguments(
        save_config(folder / "model", config),
        name,
        load_format="dummy",
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=1 << 30,
        max_num_seqs=options.batch,
        max_num_batched_tokens=max(2048, options.batch * options.prompt),
        compilation_config={"cudagraph_capture_sizes": [options.batch]},
        profiler_config={"profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False},
    )
    action = {
        "action": "profile",
        "batch": options.batch,
        "prompt": options.prompt,
        "output": 1 + NUM_DECODE_STEPS,
    }
    run = run_engine(
        folder,
        engine | options.engine | own_arguments,
        [action],
        options.ranks,
        options.limit,
        place,
        len(backends),
        **VARIABLES | variables,
    )
    found = sorted(path for path in traces.glob("*.gz") if "dp0" in path.name or "rank0" in path.name)
    return tables(found[0]) if found else run.tails()


def tables(path: Path) -> str:
    """The kernels of one layer in the prefill step and in the last decode step of a trace."""
    steps = steps_of(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    lines = []
    for title, step in (("prefill", steps[0]), ("decode", steps[-1])):
        lines += [f"### {title}", "", "| us | stream | kernel |", "|---|---|---|"]
        lines += [f"| {each['dur']:.1f} | {each['args']['stream']} | {name_of(each)} |" for each in layer_of(step)]
        lines.append("")
    return "\n".join(lines)


def steps_of(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The kernels of each step in the order in which they begin. vLLM marks steps as execute_..."""
    kernels = sorted((each for each in events if each.get("cat") in KINDS), key=lambda each: each["ts"])
    marks = [each for each in events if each.get("cat") == MARK and each["name"].startswith("execute")]
    return [
        [each for each in kernels if mark["ts"] <= each["ts"] < mark["ts"] + mark["dur"]]
        for mark in sorted(marks, key=lambda each: each["ts"])
    ]


def layer_of(step: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the kernel in front of the first choice of experts, which is the gate, to the next norm."""
    names = [each["name"].lower() for each in step]
    choice = next(place for place, name in enumerate(names) if "topk" in name)
    end = next(place for place, name in enumerate(names) if place > choice and ("norm" in name or "rsqrt" in name))
    return step[max(0, choice - 1) : end + 1]


def name_of(kernel: dict[str, Any]) -> str:
    """A kernel's name without what would break a table."""
    return str(kernel["name"]).replace("|", " ")[:LONGEST_NAME]


if __name__ == "__main__":
    main()
