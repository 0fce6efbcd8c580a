"""The README as a stranger uses it: its program runs as printed, it is short; so do commands of docs/cli.md."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest

from tests.integration.programs import ROOT, run_cli, run_python, succeeded

if TYPE_CHECKING:
    from pathlib import Path

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAM = next(iter(re.findall(r"```python\n(import torch\n.*?)```", README, re.DOTALL)))
COMMANDS = re.findall(r"^ep-a2a ([a-z].*)$", (ROOT / "docs" / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
GUIDES = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("deepep", "mori", "triton_distributed"))
IMPORTS = re.findall(r"^(?:from|import) ep_a2a\.compat.*$", GUIDES, re.MULTILINE)
NUM_RANKS = 4
MAX_WORDS = 1100
MAX_PROGRAM_LINES = 12
MODEL = '{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_experts": 64, '
MODEL += '"num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_hidden_layers": 4, "torch_dtype": "bfloat16"}'


def test_it_is_short():
    assert len(README.split()) <= MAX_WORDS
    assert len([line for line in PROGRAM.splitlines() if line.strip()]) <= MAX_PROGRAM_LINES


def test_the_standalone_guide_has_the_same_program():
    assert PROGRAM in (ROOT / "docs" / "standalone.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("num_ranks", [1, 3, NUM_RANKS])
def test_the_program_runs_as_printed(num_ranks: int, tmp_path: Path):
    assert "-m torch.distributed.run --standalone --nproc-per-node 4 program.py" in README
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), str(program))
    printed = succeeded(run_python(*launch, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""))
    found = re.findall(r"rank (\d+): (\d+) rows, largest error ([\d.]+)", printed)
    assert sorted(int(rank) for rank, _, _ in found) == list(range(num_ranks))
    # a bf16 sum of two experts, compared with a float32 product
    assert all(float(error) < 0.1 for _, _, error in found)


@pytest.mark.parametrize("line", IMPORTS)
def test_imports_of_the_guides_work(line: str):
    succeeded(run_python("-c", line.partition("  #")[0]))


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.split()[0] in ("plan", "backends")])
def test_the_commands_run(line: str, tmp_path: Path):
    model = tmp_path / "config.json"
    model.write_text(MODEL)
    succeeded(run_cli(*shlex.split(line.replace("config.json", str(model)))))


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.split()[0] not in ("plan", "backends")])
def test_the_other_commands_have_the_options(line: str):
    """doctor, bench, trace: their runs are tests of their own."""
    name, *options = line.split()
    helped = succeeded(run_cli(name, "--help"))
    assert not [option for option in options if option.startswith("--") and option not in helped]
