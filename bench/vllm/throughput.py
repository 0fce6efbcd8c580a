"""Tokens per second of a real vLLM engine on GPUs with dummy weights, by all-to-all backend. Batches start all at once.

    python -m bench.vllm.throughput --ranks 2 --layers 16 --workloads 64x64x128,256x64x128
    python -m bench.vllm.throughput --rounds 4 --workloads 64x4x128 \\
        --backends ep_a2a,ep_a2a:max_num_batched_tokens=256

A backend is a name, or NAME:KEY=VALUE where engines are to differ in more: a key in lower case is an argument of
vllm.LLM, its value JSON or else a string; any other is a variable of the environment. Values have no "," and no ":".

Engines run one after the other; with `--rounds 5` all start at once and are measured in turn, five times each, since
the speed of a machine's processor changes from minute to minute. Prints a line of JSON per backend, workload and round:
the decode step lasts as long as it does on the slowest rank; output tokens are those of all ranks, their prompts' time
included. The decode step is that of a full batch where the prompts of a batch fit into one step, or a few: sequences
that start later end later. Of an engine that fails, or is not finished in time, what it has measured is printed, and
then why it ended; the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.engines.vllm.gpu.engine import SENDS_FUNCTIONS, arguments, run_engine
from tests.engines.vllm.models import SHAPES, save_config

MAX_BATCHED_TOKENS = 8192


def main() -> None:
    """Measure all engines, and print a line per result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3_30b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=0, help="default: the shape's own number")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks, one GPU each")
    parser.add_argument(
        "--backends",
        default="ep_a2a,allgather_reducescatter",
        help="comma-separated; NAME:key=VALUE sets an argument of that engine, NAME:VARIABLE=VALUE its environment",
    )
    parser.add_argument("--workloads", default="64x64x128", help="sequences per rank x prompt x output tokens (> 1)")
    parser.add_argument("--engine", default="{}", type=json.loads, help="JSON: more arguments of vllm.LLM")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one engine, start included")
    parser.add_argument("--folder", help="that is made, for the engines' logs; default: they are not kept")
    parser.add_argument("--rounds", type=int, default=0, help="0: one engine after the other, measured once")
    options = parser.parse_args()
    options.workloads = [tuple(map(int, workload.split("x"))) for workload in options.workloads.split(",")]
    backends = options.backends.split(",")
    at_once = len(backends) if options.rounds else 1
    if options.folder:
        # files of an earlier run would tell engines that their turns have come
        Path(options.folder).mkdir(parents=True)
    kept = contextlib.nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory()
    with kept as folder, ThreadPoolExecutor(at_once) as pool:
        measured = pool.map(
            lambda place: measure(options, backends[place], Path(folder), place % at_once, at_once),
            range(len(backends)),
        )
        for results in measured:
            for result in results:
                sys.stdout.write(json.dumps(result) + "\n")
                sys.stdout.flush()


def parse_backend(backend: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Name, arguments of vllm.LLM, and variables of the environment, of NAME:KEY=VALUE:..."""
    name, *settings = backend.split(":")
    pairs = dict(setting.split("=", 1) for setting in settings)
    own_arguments = {key: parse_value(value) for key, value in pairs.items() if key.islower()}
    return name, own_arguments, {key: value for key, value in pairs.items() if not key.islower()}


def parse_value(value: str) -> Any:
    """JSON, or else the string."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def measure(
    options: argparse.Namespace, backend: str, folder: Path, place: int, num_engines: int
) -> list[dict[str, Any]]:
    """What one backend reaches, a result per workload and round."""
    name, own_arguments, variables = parse_backend(backend)
    folder = folder / backend.replace(":", "-")
    config = SHAPES[options.shape]
    config = config | {"num_hidden_layers": options.layers or config["num_hidden_layers"]}
    batches, prompts, outputs = zip(*options.workloads)
    engine = (
        arguments(
            save_config(folder / "model", config),
            name,
            load_format="dummy",
            gpu_memory_utilization=0.8 / num_engines,
            max_model_len=max(map(sum, zip(prompts, outputs))),
            max_num_seqs=max(batches),
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            compilation_config={"cudagraph_capture_sizes": sorted({1, *batches})},
        )
        | options.engine
        | own_arguments
    )
    rounds = range(max(1, options.rounds))
    actions = [
        {
            "action": "throughput",
            "label": f"{number} {batch}x{prompt}x{output}",
            "batch": batch,
            "prompt": prompt,
            "output": output,
        }
        for number in rounds
        for batch, prompt, output in options.workloads
    ]
    variables = SENDS_FUNCTIONS | variables
    run = run_engine(folder, engine, actions, options.ranks, options.limit, place, num_engines, **variables)
    results: list[dict[str, Any]] = []
    for number, (batch, prompt, output) in itertools.product(rounds, options.workloads):
        ranks = run.reported(f"{number} {batch}x{prompt}x{output}")
        if len(ranks) < options.ranks:
            return [*results, {"backend": backend, "error": run.tails()}]
        secs, few_secs = (max(rank[name] for rank in ranks) for name in ("secs", "few_secs"))
        step_secs = (secs - few_secs) / (output - ranks[0]["few"])
        total = options.ranks * batch
        results.append(
            {
                "backend": backend,
                "shape": options.shape,
                "layers": config["num_hidden_layers"],
                "ranks": options.ranks,
                "round": number,
                "batch": batch,
                "prompt": prompt,
                "output": output,
                "decode_step_ms": round(step_secs * 1e3, 3),
                "decode_tokens_per_sec": round(total / step_secs),
                "output_tokens_per_sec": round(total * output / secs),
            }
        )
    return results


if __name__ == "__main__":
    main()
