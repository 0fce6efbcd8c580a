"""Runs the multi-GPU tests and benchmarks in parts, each command within a time limit.

    python tools/many_gpus.py tests bench --folder rows
    python tools/many_gpus.py layer --dry-run

FOLDER gets what each command prints, and its rows. A line per command says how it ended and how long it took. The exit
code is 1 where one failed or was cut off. Tests of a part run one group after the other: ranks that are killed disturb
others on the same GPUs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
BENCH = "-m ep_a2a bench --iterations 30 --quant fp8_per_1x128 --layout rank_major"
PEERS = "--contenders reference_push,ep_a2a,nccl_agrs,flashinfer,deepep"
OURS = "--contenders reference_push,ep_a2a"
MULTIGPU = "-m pytest -q -n 0 -m multigpu --timeout 150 tests/multigpu"
CLEAN_UP_SECS = 30


class Command(NamedTuple):
    """What runs: a name for its files, seconds after which it is ended, arguments of python with {ranks} and {rows}."""

    name: str
    limit_secs: int
    arguments: str
    environment: tuple[tuple[str, str], ...] = ()


WHEN_USED = (("EP_A2A_TEST_COMPILE_WHEN_USED", "1"),)
PARTS: dict[str, tuple[Command, ...]] = {
    "tests": (
        Command("precompile", 240, "-m tests.multigpu.precompile"),
        Command("tests", 900, f"{MULTIGPU} -k 'not (test_faults or special)'", WHEN_USED),
        Command("special", 400, f"{MULTIGPU}/test_op.py -k 'special or missing or compiled or pool'"),
        Command("faults", 200, f"{MULTIGPU}/test_faults.py"),
    ),
    "bench": (
        Command("peers", 300, f"{BENCH} --ranks {{ranks}} {PEERS} --output {{rows}}"),
        Command("bf16", 120, f"{BENCH} --ranks {{ranks}} {PEERS} --quant none --output {{rows}}"),
        Command("24_sms", 60, f"{BENCH} --ranks {{ranks}} {OURS} --max-sms 24 --output {{rows}}"),
    ),
    "more": (
        Command("compact", 120, f"{BENCH} --ranks {{ranks}} {OURS} --layout compact --output {{rows}}"),
        Command("expert_major", 120, f"{BENCH} --ranks {{ranks}} {OURS} --layout expert_major --output {{rows}}"),
        Command("fp8", 120, f"{BENCH} --ranks {{ranks}} {OURS} --combine-quant fp8_blockwise --output {{rows}}"),
        Command("few_sms", 120, f"{BENCH} --ranks {{ranks}} {OURS} --max-sms 8,16,32 --output {{rows}}"),
    ),
    "layer": (
        Command("layer", 400, "-m ep_a2a bench --layer --ranks {ranks} --output {rows}"),
        Command("uneven", 200, "-m ep_a2a bench --layer --uneven --ranks {ranks} --output {rows}"),
    ),
    "vllm": (
        Command(
            "vllm_tests",
            1800,
            "-m pytest -q -n 0 -m multigpu tests/integration/test_vllm_gpu.py",
            (("EP_A2A_TEST_VLLM_RANKS", "{ranks}"),),
        ),
        Command("vllm_bench", 3600, "-m bench.vllm --ranks {ranks} --folder {folder}/vllm"),
    ),
}


def run(command: Command, folder: Path, num_ranks: int) -> bool:
    """Runs a command and prints how it ended; whether it ended well."""
    names = {"ranks": str(num_ranks), "rows": str(folder / f"{command.name}.jsonl"), "folder": str(folder)}
    own = {name: value.format(**names) for name, value in command.environment}
    environment = os.environ | {"EP_A2A_TEST_RESULTS": str(folder / command.name)} | own
    start = time.monotonic()
    with (folder / f"{command.name}.txt").open("w", encoding="utf-8") as printed:
        process = subprocess.Popen(
            words_of(command, names), cwd=PROJECT, env=environment, stdout=printed, stderr=subprocess.STDOUT
        )
        try:
            code: int | str = process.wait(command.limit_secs)
        except subprocess.TimeoutExpired:
            code = "cut off"
            interrupt(process)
    sys.stdout.write(f"{command.name}: {code}, {time.monotonic() - start:.0f} s\n")
    sys.stdout.flush()
    return code == 0


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ends a process as Ctrl-C does, so that it ends what it has started; kills it if it stays."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(CLEAN_UP_SECS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def words_of(command: Command, names: dict[str, str]) -> list[str]:
    """The words of its command line."""
    return [sys.executable, *(word.format(**names) for word in shlex.split(command.arguments))]


def main() -> int:
    """Runs the parts that were named; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="part", help=", ".join(PARTS))
    parser.add_argument("--ranks", type=int, default=0, help="0: a rank for each GPU")
    parser.add_argument("--folder", type=Path, default=Path("rows"), help="for rows and what is printed")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args()
    if options.ranks == 0:
        import torch

        options.ranks = torch.cuda.device_count()
    commands = [command for part in options.parts for command in PARTS[part]]
    if options.dry_run:
        names = {"ranks": str(options.ranks), "rows": "ROWS", "folder": str(options.folder)}
        sys.stdout.writelines(" ".join(words_of(command, names)) + "\n" for command in commands)
        return 0
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ended_well = [run(command, folder, options.ranks) for command in commands]
    return 0 if all(ended_well) else 1


if __name__ == "__main__":
    sys.exit(main())
