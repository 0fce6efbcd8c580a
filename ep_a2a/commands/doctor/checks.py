"""All checks, in the order in which the report prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.checks_backend import check_library
from ep_a2a.commands.doctor.checks_engines import ENGINES
from ep_a2a.commands.doctor.checks_gpu import GPUS
from ep_a2a.commands.doctor.checks_links import LINKS
from ep_a2a.commands.doctor.checks_software import SOFTWARE
from ep_a2a.commands.doctor.checks_variables import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.commands.doctor.diagnostic import Diagnostic
    from ep_a2a.commands.doctor.system_info import SystemInfo

CHECKS: dict[str, tuple[Callable[[SystemInfo], list[Diagnostic]], ...]] = {
    "software": (*SOFTWARE, check_library),
    "GPUs": GPUS,
    "links and memory": LINKS,
    "engines": ENGINES,
    "variables": VARIABLES,
}
"""By section of the report."""


def run_checks(info: SystemInfo) -> dict[str, list[Diagnostic]]:
    """Returns the diagnostics of all checks, by section."""
    return {section: [each for check in checks for each in check(info)] for section, checks in CHECKS.items()}
