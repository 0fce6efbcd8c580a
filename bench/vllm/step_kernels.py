"""The kernels of one prefill and one decode step of a real vLLM engine on GPUs, between the gate and the next norm.

    python -m bench.vllm.step_kernels --ranks 2 --layers 2 --backends ep_a2a,allgather_reducescatter

A backend is named as in throughput.py. Each engine runs DeepSeek-V3's shape with fp8 experts and dummy weights. torch's
profiler records a prefill step of `--batch` prompts per rank, and the decode steps behind it. The traces stay in
`--folder`; `--read` prints the tables of traces that are there already.

For each backend, rank and kind of step a table lists the kernels of a layer in the order in which they begin: the
median of their microseconds over all layers of all such steps, in how many of these layers they are, their stream and
name. A kernel that waits for another rank lasts as long as it waits. A trace in which no step has all tokens of the
prompts, or none of its steps has one token per sequence, is refused.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.vllm.throughput import parse_backend
from tests.engines.vllm.gpu.engine import SENDS_FUNCTIONS, arguments, run_engine
from tests.engines.vllm.models import SHAPES, quantized, save_config

NUM_DECODE_STEPS = 5
LONGEST_NAME = 100
KINDS, MARK = ("kernel", "gpu_memcpy", "gpu_memset"), "gpu_user_annotation"
STEP = re.compile(r"execute_context_\d+\((\d+)\)_generation_\d+\((\d+)\)")
"""vLLM's mark of a step: the tokens of prompts in it, and those of sequences that go on."""
VARIABLES = SENDS_FUNCTIONS | {
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
    parser.add_argument("--read", action="store_true", help="run nothing")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    if not options.read:
        options.folder.mkdir(parents=True)
    backends = options.backends.split(",")
    with ThreadPoolExecutor(len(backends)) as pool:
        runs = pool.map(lambda place: profiled(options, backends, place), range(len(backends)))
        for backend, text in zip(backends, runs, strict=True):
            sys.stdout.write(f"## {backend}\n\n{text}\n")
            sys.stdout.flush()


def profiled(options: argparse.Namespace, backends: list[str], place: int) -> str:
    """Runs one engine; returns its tables, or why there are none."""
    traces = options.folder / backends[place].replace(":", "-") / "traces"
    ended = "" if options.read else run_profiled(options, backends, place, traces)
    found = sorted(traces.glob("*.gz"))
    return "\n".join(tables(path, options.batch * options.prompt, options.batch) for path in found) or ended


def run_profiled(options: argparse.Namespace, backends: list[str], place: int, traces: Path) -> str:
    """Runs one engine, which writes its traces; returns why it ended, and the ends of its logs."""
    name, own_arguments, variables = parse_backend(backends[place])
    config = quantized(SHAPES["deepseek_v3"] | {"num_hidden_layers": options.layers})
    engine = arguments(
        save_config(traces.parent / "model", config),
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
        traces.parent,
        engine | options.engine | own_arguments,
        [action],
        options.ranks,
        options.limit,
        place,
        len(backends),
        **VARIABLES | variables,
    )
    return run.tails()


@dataclass
class Step:
    """A step of vLLM: the tokens of prompts, those of sequences that go on, and its kernels as they begin."""

    num_prompt_tokens: int
    num_decode_tokens: int
    end: float
    kernels: list[dict[str, Any]] = field(default_factory=list)


def tables(path: Path, num_prompt_tokens: int, num_decode_tokens: int) -> str:
    """The kernels of a layer in the prefill steps and in the decode steps of one rank's trace.

    Raises:
        ValueError: the trace has no step of `num_prompt_tokens`, or none of `num_decode_tokens`.
    """
    steps = steps_of(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    lines = []
    for title, wanted in (("prefill", (num_prompt_tokens, 0)), ("decode", (0, num_decode_tokens))):
        found = [step for step in steps if (step.num_prompt_tokens, step.num_decode_tokens) == wanted]
        if not found:
            seen = Counter((step.num_prompt_tokens, step.num_decode_tokens) for step in steps)
            raise ValueError(f"{path}: no step has {wanted} tokens of prompts and decode; steps have {dict(seen)}")
        layers = [layer for step in found for layer in layers_of(step.kernels)]
        lines += [f"### {title} of {sum(wanted)} tokens, {path.name.split('.')[0]}", ""]
        lines += ["| us | of layers | stream | kernel |", "|---|---|---|---|", *rows_of(layers), ""]
    return "\n".join(lines)


def steps_of(events: list[dict[str, Any]]) -> list[Step]:
    """The steps that vLLM has marked. A step has a mark on each stream, which lie one in the other."""
    steps: list[Step] = []
    kernels = kernels_of(events)
    for mark in sorted((each for each in events if each.get("cat") == MARK), key=lambda each: each["ts"]):
        named = STEP.match(mark["name"])
        if named and steps and mark["ts"] < steps[-1].end:
            steps[-1].end = max(steps[-1].end, mark["ts"] + mark["dur"])
        elif named:
            begun = [each for each in kernels if mark["ts"] <= each["ts"]]
            steps.append(Step(int(named[1]), int(named[2]), mark["ts"] + mark["dur"], begun))
    for step in steps:
        step.kernels = [each for each in step.kernels if each["ts"] < step.end]
    return steps


def kernels_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All kernels and copies as they begin."""
    return sorted((each for each in events if each.get("cat") in KINDS), key=lambda each: each["ts"])


def layers_of(kernels: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The kernels of each layer with experts: from behind one norm to the next, around the choice of experts."""
    names = [each["name"].lower() for each in kernels]
    norms = [place for place, name in enumerate(names) if "norm" in name or "rsqrt" in name]
    return [
        kernels[begin + 1 : end + 1]
        for begin, end in itertools.pairwise([-1, *norms])
        if any("topk" in name for name in names[begin + 1 : end])
    ]


def rows_of(layers: list[list[dict[str, Any]]]) -> list[str]:
    """A row per kernel, and one for the time from the first one's begin to the last one's end."""
    found: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for layer in layers:
        seen: Counter[str] = Counter()
        for place, each in enumerate(layer):
            found[each["name"], seen[each["name"]]].append((place, each))
            seen[each["name"]] += 1
    in_order = sorted(found.items(), key=lambda item: statistics.median(place for place, _ in item[1]))
    rows = [
        f"| {statistics.median(each['dur'] for _, each in places):.1f} | {len(places)} of {len(layers)} | "
        f"{places[0][1]['args']['stream']} | {name_of(name)} |"
        for (name, _), places in in_order
    ]
    whole = statistics.median(max(each["ts"] + each["dur"] for each in layer) - layer[0]["ts"] for layer in layers)
    return [*rows, f"| {whole:.1f} | | | from the first one's begin to the last one's end |"]


def name_of(kernel: str) -> str:
    """A kernel's name without what would break a table."""
    return kernel.replace("|", " ")[:LONGEST_NAME]


if __name__ == "__main__":
    main()
