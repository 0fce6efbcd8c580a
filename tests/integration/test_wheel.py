"""The wheel: what is in it, what it says of itself, and that it works outside of the checkout.

`make install-matrix` does more: it installs other versions of torch, Triton and Python. Here the packages of the test
environment serve.
"""

import configparser
import email
import importlib.util
import json
import os
import re
import sys
import venv
import zipfile
from email.message import Message
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import ep_a2a
from tests.integration.programs import ROOT, run, succeeded

SHIPPED = sorted(path.name for path in (ROOT / "configs").glob("*.*"))
LOOK = (
    "from ep_a2a.compat import deep_ep_sizes; print(deep_ep_sizes.__file__); print(len(deep_ep_sizes.deep_ep_table()))"
)
TINY = ("--ranks", "2", "--device", "cpu", "--tokens", "12", "--hidden", "128", "--experts", "4", "--topk", "2")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, ROOT / "tools" / "build_wheel.py", folder)
    if "Could not find a version that satisfies the requirement setuptools" in done.stderr:
        pytest.skip("no setuptools that can build the project, and none to be had")
    return Path(succeeded(done).strip())


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def text_of(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"ep_a2a-{ep_a2a.__version__}.dist-info/{name}").decode()


def metadata_of(wheel: Path) -> Message:
    return email.message_from_string(text_of(wheel, "METADATA"))


def test_it_is_for_any_python_and_machine(wheel, names):
    assert wheel.name == f"ep_a2a-{ep_a2a.__version__}-py3-none-any.whl"
    assert "Root-Is-Purelib: true" in text_of(wheel, "WHEEL")
    assert {Path(name).suffix for name in names} <= {".py", ".cu", ".json", ".toml", ".yaml", ".typed", ".txt", ""}


def test_all_that_is_needed_is_in_it_and_nothing_else(names):
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ep_a2a").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}
    assert {f"ep_a2a/configs/{name}" for name in SHIPPED} <= set(names)
    assert {"ep_a2a/py.typed", "ep_a2a/integrations/vllm/contract.toml"} <= set(names)
    assert {"ep_a2a/commands/measure/push.cu", "ep_a2a/commands/plan/families.toml"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"ep_a2a", f"ep_a2a-{ep_a2a.__version__}.dist-info"}


def test_what_it_says_of_itself(wheel):
    metadata = metadata_of(wheel)
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = [text for text in metadata.get_all("Requires-Dist") or [] if "extra ==" not in text]
    assert {text.split(">=")[0] for text in needed} == {"torch", "triton", "numpy", "filelock", "typer", "rich"}
    assert metadata["License-File"] == "LICENSE"
    shown = metadata.get_payload()
    assert shown.startswith("# ep_a2a")
    assert not re.search(r"]\((?!https?:)|<picture|<!--", shown)  # what a package index shows has no files beside it


def test_programs_and_plugins_are_there(wheel):
    entries = configparser.ConfigParser()
    entries.read_string(text_of(wheel, "entry_points.txt"))
    for group, name in (("console_scripts", "ep-a2a"), ("vllm.general_plugins", "ep_a2a")):
        assert callable(EntryPoint(name, entries[group][name], group).load())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an environment with the wheel and the packages of this one, but not this checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    install.borrow_packages(folder)
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet")
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check", "--ignore-installed")
    succeeded(run(*pip, *offline, wheel))
    return folder / "bin"


def run_installed(installed: Path, cwd: Path, program: str, *arguments: str) -> str:
    """What a program of the environment prints, run where the checkout cannot be imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EP_A2A_", "PYTHON"))}
    return succeeded(run(installed / program, *arguments, env=kept, cwd=cwd))


def test_it_finds_its_tables(installed, tmp_path):
    module, count = run_installed(installed, tmp_path, "python", "-c", LOOK).splitlines()
    assert Path(module).is_relative_to(installed.parent)
    assert int(count) > 0


def test_its_doctor_finds_the_installation(installed, tmp_path):
    report = json.loads(run_installed(installed, tmp_path, "ep-a2a", "doctor", "--json"))
    machine = report["machine"]
    assert machine["version"] == machine["installed_version"] == ep_a2a.__version__
    assert machine["vllm_entry_point"] is True


def test_its_demo_runs_without_a_checkout(installed, tmp_path):
    report = json.loads(run_installed(installed, tmp_path, "ep-a2a", "demo", "--json", *TINY))
    assert report["matches"] is True
