"""The README as a stranger uses it: its program runs as printed, it is short; so do commands of docs/cli.md."""

import re
import shlex
from pathlib import Path

import pytest

from ep_a2a.cli import app
from tests.integration.programs import ROOT, run_python, succeeded

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAM = next(iter(re.findall(r"```python\n(import torch\n.*?)```", README, re.DOTALL)))
COMMANDS = re.findall(r"^ep-a2a ([a-z].*)$", (ROOT / "docs" / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
GUIDES = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("deepep", "mori", "triton_distributed"))
IMPORTS = re.findall(r"^(?:from|import) ep_a2a\.compat.*$", GUIDES, re.MULTILINE)
NUM_RANKS = 4
MAX_WORDS = 1100
MAX_PROGRAM_LINES = 13
MODEL = '{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_experts": 64, '
MODEL += '"num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_hidden_layers": 4, "torch_dtype": "bfloat16"}'


def test_it_is_short():
    read = re.sub(r"<!--.*?-->", "", README)
    assert len(read.split()) <= MAX_WORDS
    assert len([line for line in PROGRAM.splitlines() if line.strip()]) <= MAX_PROGRAM_LINES


def test_the_standalone_guide_includes_the_program():
    guide = (ROOT / "docs" / "standalone.md").read_text(encoding="utf-8")
    found = re.search(r"{literalinclude} \.\./README\.md\n:language: python\n:start-at: (.*)\n:end-at: (.*)\n", guide)
    assert found
    first, last = (line for each in found.groups() for line in README.splitlines() if each in line)
    assert (first, last) == (PROGRAM.splitlines()[0], PROGRAM.splitlines()[-1])


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


def test_imports_of_the_guides_work():
    assert IMPORTS
    succeeded(run_python("-c", "\n".join(line.partition("  #")[0] for line in IMPORTS)))


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run_or_have_the_options(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """plan and backends run; runs of doctor, bench and trace are tests of their own."""
    model = tmp_path / "config.json"
    model.write_text(MODEL)
    name, *options = shlex.split(line.replace("config.json", str(model)))
    runs = name in ("plan", "backends")
    with pytest.raises(SystemExit) as ended:
        app.run((name, *options) if runs else (name, "--help"))
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    assert runs or not [option for option in options if option.startswith("--") and option not in printed.out]
