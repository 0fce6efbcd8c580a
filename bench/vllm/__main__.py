"""Decode steps and prompts of a real vLLM engine on GPUs, with dummy weights, by all-to-all backend.

    python -m bench.vllm --ranks 4 --shape deepseek_v2_lite --layers 10 --tokens 64,512

One engine is up at a time, in the order A-B-B-A. `decode T`: microseconds of the CUDA graph of the engine's own step of
T sequences per rank, replayed by all ranks at once; then profiled steps. A step with a gap of more than 10 % is
host-bound: only replays compare exchanges. `prompts`: microseconds until the first token on the slowest rank, for a
prompt on each rank, and for one beside UNEVEN tokens on each other rank; then a profiled step.

Prints a line of JSON per workload and turn of an engine, then a table: medians, with the least and the most. A backend
is a name, or NAME:KEY=VALUE:...: a key in lower case is an argument of vllm.LLM, its value JSON or else a string; any
other is a variable of the environment. Values have no "," and no ":". The others go on where an engine fails.
"""

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.vllm.probe import WARM_STEPS
from bench.vllm.rank import PROMPT_TOKENS
from bench.vllm.report import of_ranks, schedule, table
from tests.engines.vllm.gpu.engine import SENDS_FUNCTIONS, Action, arguments, run_engine
from tests.engines.vllm.models import SHAPES, save_config

BACKENDS = "ep_a2a,ep_a2a_low_latency,allgather_reducescatter,allgather_reducescatter:VLLM_USE_NCCL_SYMM_MEM=1"
if importlib.util.find_spec("deep_ep"):
    BACKENDS += ",deepep_high_throughput,deepep_low_latency"
STEPS = 20
"""Profiled of each decode workload."""
UNEVEN = 64
"""Tokens of each rank beside the one with a long prompt."""


def main() -> int:
    """Measures all engines; the exit code."""
    options = parse_options()
    rows: list[dict[str, Any]] = []
    failed = set()
    with tempfile.TemporaryDirectory() as temporary:
        for turn, backend in enumerate(schedule(options.backends.split(","), options.rounds)):
            if backend in failed:
                continue
            folder = (options.folder or Path(temporary)) / f"{turn}-{backend.replace(':', '-')}"
            measured = measure(options, backend, turn, folder)
            failed |= {row["backend"] for row in measured if "error" in row}
            rows += measured
            sys.stdout.writelines(json.dumps(row) + "\n" for row in measured)
            sys.stdout.flush()
    sys.stdout.write(table(rows))
    return 1 if failed else 0


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="default: one for each GPU")
    parser.add_argument("--shape", default="qwen3_30b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=0, help="default: the shape's own number")
    parser.add_argument("--backends", default=BACKENDS, help="comma-separated; default: %(default)s")
    parser.add_argument("--tokens", default="64,128,256,512", help="sequences per rank that decode")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a rank's prompt; 0: no prompts")
    parser.add_argument("--rounds", type=int, default=1, help="two turns of each engine, this many times")
    parser.add_argument("--replays", type=int, default=200, help="of a graph, five times a turn")
    parser.add_argument("--engine", default={}, type=json.loads, help="JSON: more arguments of vllm.LLM")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one turn of an engine, start included")
    parser.add_argument("--folder", type=Path, help="for the engines' logs; default: they are not kept")
    options = parser.parse_args()
    options.tokens = [int(number) for number in options.tokens.split(",")]
    options.layers = options.layers or SHAPES[options.shape]["num_hidden_layers"]
    options.config = SHAPES[options.shape] | {"num_hidden_layers": options.layers}
    return options


def actions_of(options: argparse.Namespace) -> list[Action]:
    """What each engine does, in order; the label is the workload's name."""
    layers = {"num_layers": options.layers - options.config.get("first_k_dense_replace", 0)}
    replayed = {"action": "decode", "num_replays": options.replays, "num_steps": STEPS} | layers
    actions = [replayed | {"label": f"decode {number}", "num_sequences": number} for number in options.tokens]
    if options.prompt:
        first_token = {"action": "prefill", "rounds": 5} | layers
        one = [[options.prompt], *[[1] * UNEVEN] * (options.ranks - 1)]
        equal = [[options.prompt]] * options.ranks
        actions.append(first_token | {"label": f"prompts of {options.prompt}", "lengths": equal})
        actions.append(first_token | {"label": f"prompt of {options.prompt} on one rank", "lengths": one})
    return actions


def parse_backend(backend: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Name, arguments of vllm.LLM, and variables of the environment, of NAME:KEY=VALUE:..."""
    name, *settings = backend.split(":")
    found: dict[str, Any] = dict(setting.split("=", 1) for setting in settings)
    own_arguments = {key: value for key, value in found.items() if key.islower()}
    for key, value in own_arguments.items():
        with contextlib.suppress(json.JSONDecodeError):
            own_arguments[key] = json.loads(value)
    return name, own_arguments, {key: value for key, value in found.items() if key not in own_arguments}


def engine_of(options: argparse.Namespace, model: Path, name: str) -> dict[str, Any]:
    """Arguments of vllm.LLM."""
    ranks_per_gpu = max(1, options.ranks // max(1, torch.cuda.device_count()))
    return arguments(
        model,
        name,
        load_format="dummy",
        gpu_memory_utilization=round(0.8 / ranks_per_gpu, 3),
        max_model_len=max(options.prompt + 1, PROMPT_TOKENS + WARM_STEPS + STEPS + 2),
        max_num_seqs=max(*options.tokens, UNEVEN),
        max_num_batched_tokens=max(options.prompt, PROMPT_TOKENS * max(options.tokens)),
        compilation_config={"cudagraph_capture_sizes": sorted({1, *options.tokens})},
    )


def measure(options: argparse.Namespace, backend: str, turn: int, folder: Path) -> list[dict[str, Any]]:
    """A row per workload of one turn of an engine, and one with the error of an engine that fails."""
    actions = actions_of(options)
    name, own_arguments, variables = parse_backend(backend)
    engine = engine_of(options, save_config(folder / "model", options.config), name) | options.engine | own_arguments
    variables |= SENDS_FUNCTIONS
    run = run_engine(folder, engine, actions, options.ranks, options.limit, program="bench.vllm.rank", **variables)
    head = {"backend": backend, "turn": turn, "shape": options.shape, "layers": options.layers, "ranks": options.ranks}
    rows = []
    for action in actions:
        reports = run.reported(action["label"])
        if len(reports) < options.ranks:
            return [*rows, head | {"error": run.tails()}]
        row = head | {"workload": action["label"]} | of_ranks(reports)
        if not row["us"]:
            return [*rows, row | {"error": "its decode step is not one CUDA graph; cudagraph_mode must be FULL"}]
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
