"""All checks, in the order in which the report prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.checks_backend import check_library
from ep_a2a.commands.doctor.checks_engines import check_engines
from ep_a2a.commands.doctor.checks_gpu import check_gpus
from ep_a2a.commands.doctor.checks_links import check_links
from ep_a2a.commands.doctor.checks_software import check_software
from ep_a2a.commands.doctor.checks_variables import check_variables

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.diagnostic import Diagnostic
    from ep_a2a.commands.doctor.system_info import SystemInfo


def run_checks(info: SystemInfo) -> dict[str, list[Diagnostic]]:
    """Returns the diagnostics of all checks, by section of the report."""
    return {
        "software": [*check_software(info), *check_library(info)],
        "GPUs": [*check_gpus(info)],
        "links and memory": [*check_links(info)],
        "engines": [*check_engines(info)],
        "variables": [*check_variables(info)],
    }
