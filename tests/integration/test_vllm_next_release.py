"""The next release of vLLM, simulated by edits of the newest one: which are taken, and which are refused."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ep_a2a.integrations import contract
from ep_a2a.integrations.vllm.support import CONTRACT
from tests.engines.vllm.contract.reports import PROGRAM_TIMEOUT_SECS, TIMEOUT, run_checks
from tests.engines.vllm.contract.wheels import NEWEST, ROOT, Unavailable, python_with_dependencies, wheel_folder

pytestmark = TIMEOUT

Edit = tuple[str, str, str]
FUSED_MOE = "model_executor/layers/fused_moe"
KERNEL = f"{FUSED_MOE}/modular_kernel.py"
COMMUNICATOR = "distributed/device_communicators/base_device_communicator.py"
END_OF_PREPARE = "        defer_input_quant: bool,\n    ) -> PrepareResultType:"
FIRST_METHOD = "    def post_init_setup(self, fused_experts"

HARMLESS: dict[str, Edit] = {
    "a wrapped function takes one more": (
        f"{FUSED_MOE}/all2all_utils.py",
        "    input_dtype: torch.dtype | None = None,\n) -> FusedMoEPrepareAndFinalize | None:",
        "    input_dtype: torch.dtype | None = None,\n    more: int = 0,\n) -> FusedMoEPrepareAndFinalize | None:",
    ),
    "a called function takes one more": (
        f"{FUSED_MOE}/utils.py",
        "    mx_alignment: int = 0,\n",
        "    mx_alignment: int = 0,\n    more: int = 0,\n",
    ),
    "a called function without parameters takes one": (
        "distributed/parallel_state.py",
        "def get_ep_group()",
        'def get_ep_group(name: str = "ep")',
    ),
    "another backend": ("config/parallel.py", '    "naive",\n', '    "naive",\n    "another",\n'),
    "another method that layers may override": (
        KERNEL,
        FIRST_METHOD,
        f"    def more(self) -> bool:\n        return False\n\n{FIRST_METHOD}",
    ),
}
HARMFUL: dict[str, tuple[Edit, str]] = {
    "a field is renamed": (
        (COMMUNICATOR, "self.use_all2all =", "self.uses_all2all ="),
        "has no DeviceCommunicatorBase.use_all2all",
    ),
    "a called function needs one more": (
        (
            f"{FUSED_MOE}/utils.py",
            "    A_scale: torch.Tensor | None,\n    quant_dtype",
            "    A_scale: torch.Tensor | None,\n    more: int,\n    quant_dtype",
        ),
        "moe_kernel_quantize_input of vllm/model_executor/layers/fused_moe/utils.py cannot be called",
    ),
    "an overridden function takes one more": (
        (KERNEL, END_OF_PREPARE, END_OF_PREPARE.replace("\n", "\n        more: int = 0,\n", 1)),
        "FusedMoEPrepareAndFinalizeModular.prepare of vllm/model_executor/layers/fused_moe/modular_kernel.py takes",
    ),
    "another method that layers must have": (
        (KERNEL, FIRST_METHOD, f"    @abstractmethod\n    def more(self) -> bool: ...\n\n{FIRST_METHOD}"),
        "has abstract methods that ep_a2a lacks: more",
    ),
    "a parameter that the wrapper reads is renamed": (
        (
            f"{FUSED_MOE}/all2all_utils.py",
            "    allow_new_interface: bool = False,\n    use_monolithic",
            "    new_interface: bool = False,\n    use_monolithic",
        ),
        "without allow_new_interface",
    ),
}


@pytest.fixture
def edited(tmp_path) -> Callable[[Iterable[Edit]], Path]:
    """`edited(edits)`: a folder with the newest vLLM after these edits."""

    def edit(edits: Iterable[Edit]) -> Path:
        try:
            wheel = wheel_folder(NEWEST)
        except Unavailable as problem:
            pytest.skip(str(problem))
        folder = tmp_path / "release"
        shutil.copytree(wheel, folder, copy_function=os.symlink)
        for name, before, after in edits:
            path = folder / "vllm" / name
            source = path.read_text()
            assert source.count(before) >= 1, before
            path.unlink()
            path.write_text(source.replace(before, after))
        return folder

    return edit


@pytest.fixture
def python() -> Path:
    """A Python that can import vLLM."""
    try:
        return python_with_dependencies()
    except Unavailable as problem:
        pytest.skip(str(problem))


@pytest.mark.parametrize("change", HARMLESS)
def test_a_harmless_change_is_taken(edited, change):
    assert contract.differences(edited([HARMLESS[change]]) / "vllm", CONTRACT) == []


@pytest.mark.parametrize("change", HARMFUL)
def test_a_harmful_change_is_refused(edited, change):
    edit, expected = HARMFUL[change]
    (found,) = contract.differences(edited([edit]) / "vllm", CONTRACT)
    assert expected in found


@pytest.mark.parametrize("check", ["the_communicator_of_experts_carries_our_manager", "fp8_per_block"])
def test_with_all_harmless_changes_it_works(edited, python, check):
    reports = run_checks(python, edited(HARMLESS.values()), (check,))
    assert reports.get(check, "not run") is None, reports


def test_a_command_line_is_refused_with_all_harmful_changes(edited, python):
    """In the process of the command line, when vLLM loads its plugins; another backend's is taken."""
    folder = edited(edit for edit, _ in HARMFUL.values())
    program = "from ep_a2a.integrations.vllm import register; register(); print('taken')"
    for backend in ("ep_a2a", "deepep_low_latency"):
        done = subprocess.run(
            [python, "-c", program, "serve", "model", "--all2all-backend", backend],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
            capture_output=True,
            text=True,
            timeout=PROGRAM_TIMEOUT_SECS,
            check=False,
        )
        if backend == "ep_a2a":
            assert done.returncode == 1
            parts = ["ep_a2a.errors.UnsupportedError: ", "EP_A2A_ANY_VLLM=1", *(found for _, found in HARMFUL.values())]
            assert [part for part in parts if part not in done.stderr] == []
        else:
            assert done.stdout.endswith("taken\n"), done.stderr
