"""`vllm bench serve` against servers of several all-to-all backends, in turn, on GPUs with dummy weights.

    python -m bench.vllm.serving --ranks 4 --layers 10 --rounds 4 \\
        --backends ep_a2a,allgather_reducescatter --workloads decode:128x64x128,prefill:32x2048x8

A backend is named as in throughput.py. A workload is NAME:REQUESTSxPROMPTxOUTPUT, lengths in tokens: all
requests are sent at once. All servers start at once and share the GPUs, since the speed of a machine's processor
changes from minute to minute; each round measures every server once, and one round before them is not counted. Prints
a line of JSON per round, workload and backend, then a table of medians with the least and the most. A server that does
not start or dies is left out, and the end of its log is printed. With `--device cpu --backends ep_a2a` the same runs on
a CPU build of vLLM, which has no other backend, with a tiny model: times then say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.vllm.throughput import MAX_BATCHED_TOKENS, parse_backend
from tests.engines.vllm.gpu.engine import FIXED, arguments
from tests.engines.vllm.models import CONFIGS, SHAPES, save_config
from tests.engines.vllm.processes import NUM_PORTS, Server, cpu_environment
from tests.integration.programs import environment
from tests.ports import free_port

MODEL = "model"
STREAM_INTERVAL = 8
"""Tokens per chunk that a server sends: one at a time they would keep the client's processor busy, not the GPUs."""
KV_CACHE_BYTES = 3 << 30
"""Of each rank: room for a round of either default workload, several times."""
SETTLE_SECS = 3
"""After each measurement: engines go on for up to 32 steps of no tokens, which last 2 s where a step takes 60 ms."""
APART_SECS = 2
"""Between the starts of two servers, which would else look for free ports at the same time."""
FIGURES = {
    "ttft_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_ms": "median_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
    "output_tokens_per_sec": "output_throughput",
    "total_tokens_per_sec": "total_token_throughput",
}
"""Name in our rows, and in what vLLM's bench returns."""
NOT_OF_SERVERS = ("model", "skip_tokenizer_init", "distributed_executor_backend", "disable_log_stats")
"""Arguments of vllm.LLM for other tests."""


class Workload:
    """NAME:REQUESTSxPROMPTxOUTPUT."""

    def __init__(self, text: str) -> None:
        parts = re.fullmatch(r"(\w+):(\d+)x(\d+)x(\d+)", text)
        if not parts:
            raise argparse.ArgumentTypeError(f"expected NAME:REQUESTSxPROMPTxOUTPUT; got {text!r}")
        self.name = parts[1]
        self.num_requests, self.prompt, self.output = map(int, parts.groups()[1:])


class Candidate(Server):
    """The server of one backend."""

    def __init__(self, backend: str, command: list[str], variables: dict[str, str], port: int, log: Path) -> None:
        super().__init__(command, variables, port, log)
        self.backend = backend


def main() -> int:
    """Measure all servers in turn; the exit code."""
    options = parse_options()
    with contextlib.ExitStack() as stack:
        servers = []
        for backend in options.backends.split(","):
            servers.append(start(options, backend))
            stack.callback(servers[-1].end)
            time.sleep(APART_SECS)
        servers = those_up(servers, options.limit)
        rows = []
        for number in range(options.rounds + 1):
            for workload in options.workloads:
                for server in list(servers):
                    row = measured(options, server, workload, number)
                    time.sleep(SETTLE_SECS)
                    if row is None:
                        servers.remove(server)
                    elif number:
                        rows.append(row)
                        sys.stdout.write(json.dumps(row) + "\n")
                        sys.stdout.flush()
    sys.stdout.write(summary(rows))
    return 0 if rows else 1


def parse_options() -> argparse.Namespace:
    """Read the command line, make the folder, and look the model up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks, one GPU each")
    parser.add_argument("--shape", default="deepseek_v2_lite", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=0, help="default: the shape's own number")
    parser.add_argument("--backends", default="ep_a2a,allgather_reducescatter", help="comma-separated")
    parser.add_argument(
        "--workloads",
        default="decode:128x64x128,prefill:32x2048x8",
        type=lambda text: [Workload(each) for each in text.split(",")],
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--engine", default={}, type=json.loads, help="JSON: more arguments of vllm.LLM")
    parser.add_argument("--limit", type=float, default=400, help="seconds for all servers to start")
    parser.add_argument("--folder", type=Path, default=Path("serving"), help="that is made, for logs and models")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cpu":
        options.shape, config = "tiny", CONFIGS["qwen3_moe"]
    else:
        config = SHAPES[options.shape]
    options.layers = options.layers or config["num_hidden_layers"]
    options.config = config | {"num_hidden_layers": options.layers}
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True)
    return options


def start(options: argparse.Namespace, backend: str) -> Candidate:
    """Starts a server; returns before it is up."""
    name, own_arguments, own_variables = parse_backend(backend)
    folder = options.folder / backend.replace(":", "-")
    model = save_config(folder / "model", options.config)
    save_tokenizer(model, options.config["vocab_size"])
    port = free_port(NUM_PORTS)
    module = "tests.engines.vllm.cpu.server" if options.device == "cpu" else "vllm.entrypoints.cli.main"
    words = [sys.executable, "-m", module, *(["serve"] if options.device == "cuda" else []), str(model)]
    words += as_words(arguments_of(options, model, name) | options.engine | own_arguments)
    words += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    variables = cpu_environment(folder, 60) if options.device == "cpu" else environment() | FIXED
    return Candidate(backend, words, variables | own_variables, port, folder / "log")


def arguments_of(options: argparse.Namespace, model: Path, backend: str) -> dict[str, Any]:
    """Arguments of a server, named as those of vllm.LLM."""
    most = max(each.num_requests for each in options.workloads)
    own = {
        "data_parallel_size": options.ranks,
        "load_format": "dummy",
        "stream_interval": STREAM_INTERVAL,
        "max_model_len": max(each.prompt + each.output for each in options.workloads) + 16,
        "max_num_seqs": most,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "gpu_memory_utilization": round(0.8 / len(options.backends.split(",")), 3),
        # the requests of all ranks seldom spread evenly
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, *range(8, most // options.ranks + 33, 8)]},
    }
    found = {key: value for key, value in arguments(model, backend).items() if key not in NOT_OF_SERVERS} | own
    if options.device == "cpu":
        for key in ("moe_backend", "compilation_config", "gpu_memory_utilization"):
            del found[key]
        found |= {
            "enforce_eager": True,
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
        }
    return found


def as_words(found: dict[str, Any]) -> list[str]:
    """Words of `vllm serve` for arguments of vllm.LLM."""
    words = []
    for key, value in found.items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
    return words


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer with a word for each token, by which random tokens become text and the same tokens again."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t1"})
    )


def those_up(servers: list[Candidate], limit_secs: float) -> list[Candidate]:
    """Waits until all answer or have ended; returns those that answer."""
    deadline = time.monotonic() + limit_secs
    waiting = list(servers)
    while waiting and time.monotonic() < deadline:
        time.sleep(1)
        waiting = [each for each in waiting if not each.has_ended() and not each.is_up()]
    up = [each for each in servers if each not in waiting and not each.has_ended()]
    for server in servers:
        if server not in up:
            why = "has ended" if server.has_ended() else f"is not up after {limit_secs:.0f} s"
            sys.stdout.write(f"{server.backend} {why}:\n{server.last_words()}\n")
    return up


def measured(options: argparse.Namespace, server: Candidate, workload: Workload, number: int) -> dict[str, Any] | None:
    """A row of one backend, workload and round; None, and its log's end is printed, where requests failed."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as vllm_bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    tokenizer = options.folder / server.backend.replace(":", "-") / "model"
    # a seed for each round: no server may have seen the prompts before
    words = f"""--backend vllm --base-url {server.url} --model {MODEL} --dataset-name random
        --random-input-len {workload.prompt} --random-output-len {workload.output}
        --num-prompts {workload.num_requests} --ignore-eos --seed {number} --temperature 0 --disable-tqdm
        --percentile-metrics ttft,tpot,itl,e2el"""
    chosen = parser.parse_args([*words.split(), "--tokenizer", str(tokenizer)])
    with (options.folder / "bench.log").open("a") as log, contextlib.redirect_stdout(log):
        try:
            result = vllm_bench(chosen)
        except Exception as error:  # noqa: BLE001  whatever vLLM's bench raises where a server has died
            result = {"completed": 0, "error": repr(error)}
    if result["completed"] < workload.num_requests:
        sys.stdout.write(f"{server.backend} failed: {result.get('error', '')}\n{server.last_words()}\n")
        return None
    return {
        "backend": server.backend,
        "ranks": options.ranks,
        "shape": options.shape,
        "layers": options.layers,
        "workload": workload.name,
        "requests": workload.num_requests,
        "prompt": workload.prompt,
        "output": workload.output,
        "round": number,
    } | {name: round(result[key], 3) for name, key in FIGURES.items()}


def summary(rows: list[dict[str, Any]]) -> str:
    """A table: the median of rounds, and the least and the most, by workload and backend."""
    lines = [f"| workload | backend | {' | '.join(FIGURES)} |", "|---" * (2 + len(FIGURES)) + "|"]
    for workload, backend in dict.fromkeys((row["workload"], row["backend"]) for row in rows):
        own = [row for row in rows if (row["workload"], row["backend"]) == (workload, backend)]
        cells = []
        for name in FIGURES:
            values = [row[name] for row in own]
            cells.append(f"{statistics.median(values):.5g} ({min(values):.5g} to {max(values):.5g})")
        lines.append(f"| {workload} | {backend} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    sys.exit(main())
