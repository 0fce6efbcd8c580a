"""`ep-a2a demo` as a user runs it."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.programs import ROOT, environment, run_cli, run_python, succeeded

BACKENDS = ("ep_a2a", "naive", "allgather_reducescatter")
MODEL = ("--hidden", "128", "--experts", "4", "--topk", "2")
SMALL = ("demo", "--device", "cpu", "--ranks", "2", "--tokens", "12", *MODEL)

# What a test cannot ask for on the command line: experts of rank 1 that return wrong rows.
CORRUPT = """
import sys
from types import SimpleNamespace
from ep_a2a.commands.demo import run

run_rank, dense_moe = run.run_rank, run.dense_moe

def corrupted(context, *args):
    if context.rank == 1:
        run.dense_moe = lambda *args: dense_moe(*args) + 1.0
    return run_rank(context, *args)

if __name__ == "__main__":
    run.run_rank = corrupted
    settings = run.DemoSettings(ranks=2, tokens=12, hidden=128, experts=4, topk=2, backend="ep_a2a")
    options = SimpleNamespace(output=None, verbose=False, as_json=False)
    sys.exit(run.execute(settings, options))
"""


def joined(text: str) -> str:
    """The text with each run of spaces and line ends as one space."""
    return " ".join(text.split())


def checked_json(*arguments: str, **variables: str) -> dict[str, Any]:
    done = run_cli(*arguments, "--json", **variables)
    report: dict[str, Any] = json.loads(succeeded(done))
    assert report["matches"] is True
    assert report["comparison"]["rows_as_routed"] is True
    assert report["comparison"]["worst_share"] <= 1
    assert done.stderr == ""
    return report


def test_as_in_the_readme() -> None:
    printed = succeeded(run_cli("demo"))
    # the verdict comes first
    assert printed.startswith("Right: 96 tokens went through")
    for part in ("every output matches the dense layer", "from rank", "% fewer rows than with a copy for each expert"):
        assert part in joined(printed)
    # details are for those who ask
    for part in ("tolerance", "kernel", "backend"):
        assert part not in printed


@pytest.mark.parametrize(
    ("backend", "quant"),
    [
        ("ep_a2a", "none"),
        ("ep_a2a", "fp8_per_1x128"),
        ("ep_a2a", "mxfp8"),
        ("naive", "fp8_per_token"),
        ("allgather_reducescatter", "mxfp8"),
    ],
)
def test_every_backend_and_cast(backend: str, quant: str) -> None:
    report = checked_json(*SMALL, "--backend", backend, "--quant", quant)
    assert (report["backend"], report["backend_reason"]) == (backend, "named by --backend")
    assert report["tokens_per_rank"] == [4, 8]
    # every token has two experts
    assert sum(map(sum, report["rows_without_deduplication"])) == 2 * 12
    assert report["gathers"] == (backend != "ep_a2a")


def test_backends_send_the_same_rows() -> None:
    uneven = ("--ranks", "3", "--experts", "7", "--topk", "3", "--tokens", "4")
    assert len({str(checked_json(*SMALL, *uneven, "--backend", backend)["rows"]) for backend in BACKENDS}) == 1


def test_details_on_request() -> None:
    printed = succeeded(run_cli(*SMALL, "--backend", "naive", "-v"))
    assert printed.startswith("Right: 12 tokens")
    for part in ("naive: named by --backend", "strict, by element", "softmax top-2 router"):
        assert part in joined(printed)


def test_one_rank_with_few_words() -> None:
    report = checked_json(*SMALL, "--ranks", "1", "--tokens", "25")
    assert report["tokens_per_rank"] == [25]
    assert report["rows"] == [[25]]


def test_virtual_nodes() -> None:
    """As the README has it; a node's sum is rounded once more, which few elements show."""
    report = checked_json("demo", "--ranks", "4", "--gpus-per-node", "2")
    assert "virtual" in report["topology"]
    assert report["kernel"] == "InterNodeV1LL"


def test_nodes_of_unlike_sizes_are_refused() -> None:
    done = run_cli(*SMALL, "--ranks", "3", "--gpus-per-node", "2")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "UnsupportedError" in done.stderr
    assert "equally many ranks" in done.stderr
    assert "Traceback" not in done.stderr
    report = checked_json(*SMALL, "--ranks", "3", "--gpus-per-node", "2", "--backend", "allgather_reducescatter")
    assert "virtual" in report["topology"]


def test_mismatch(tmp_path: Path) -> None:
    program = tmp_path / "corrupt.py"
    program.write_text(CORRUPT)
    done = run_python(str(program))
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("Wrong: 12 tokens")
    assert "DOES NOT MATCH the dense layer" in joined(done.stdout)


def test_progress_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ep_a2a", *SMALL, "--backend", "naive"]
    with subprocess.Popen(command, cwd=ROOT, env=environment() | {"TERM": "xterm"}, stdout=theirs, stderr=theirs) as it:
        os.close(theirs)
        shown = b"".join(iter(lambda: _read_terminal(ours), b""))
    os.close(ours)
    assert it.returncode == 0, shown
    assert b"starting 2 processes" in shown
    assert b"Right: 12 tokens went through" in shown


def _read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        # Linux says EIO when the other side of a terminal is gone.
        return b""


def test_help_and_version_load_no_torch() -> None:
    program = (
        "import sys; from ep_a2a.cli import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'triton') if name in sys.modules], file=sys.stderr)"
    )
    for argument, expected in (("--version", "ep-a2a 0"), ("--help", "demo")):
        done = run_python("-c", program, argument)
        assert expected in succeeded(done)
        assert done.stderr == "[]\n"
