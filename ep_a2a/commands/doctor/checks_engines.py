"""Checks of the engines that use this package as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor.checks_software import INSTALL_WHEEL
from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Diagnostic, Level, first

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.commands.doctor.system_info import SystemInfo

PLUGIN, ATOM_PLUGIN = "ep_a2a", "ep_a2a_atom"
ATOM_LAUNCHER = "ep_a2a.integrations.atom.serve"
INSTALL = f"Install this package in vLLM's environment: {INSTALL_WHEEL}"
NO_SWITCH = "the switch does not reach ATOM as vLLM's plugin"


def check_engines(info: SystemInfo) -> Iterator[Diagnostic]:
    """Checks vLLM and ATOM, and whether they find this package's plugins."""
    vllm, atom, installed = info.vllm, info.atom, info.installation
    yield from first(
        "vLLM",
        (NOTE, vllm.version is None, "not in this environment"),
        (
            ERROR,
            vllm.version_problem,
            vllm.version_problem,
            "Install a supported vLLM, or use another --all2all-backend.",
        ),
        (
            ERROR,
            vllm.differences,
            f"{vllm.version}, in which {', '.join(vllm.differences)}",
            "Install a supported vLLM, or an ep-a2a that knows this one.",
        ),
        (OK, True, f"{vllm.version}; the plugin supports this version"),
    )
    if vllm.version is not None and not vllm.version_problem:
        yield from first(
            "vLLM's plugins",
            (
                ERROR,
                not installed.vllm_entry_point,
                "ep_a2a is not among them: vLLM will say that the backend's name is unknown",
                INSTALL,
            ),
        )
        yield from _left_out("vLLM's plugins", info, PLUGIN, ERROR)
    switch, backend = env.BACKEND.name, info.environment.get(env.BACKEND.name)
    yield from first(
        "ATOM",
        (NOTE, not atom.versions, "not in this environment"),
        (NOTE, atom.version is None, f"not in this environment; {atom.versions}"),
        (
            ERROR,
            atom.aiter is None,
            f"{atom.versions}, without AITER, from which it takes its managers",
            "Install AITER.",
        ),
        (
            NOTE,
            not backend,
            f"{atom.versions}; it runs as it is, since {switch} is not set",
            f"To change that: {switch}=BACKEND python -m {ATOM_LAUNCHER} MODULE ... (docs/atom.md)",
        ),
        (
            NOTE,
            True,
            f"{atom.versions}; {switch}={backend} is for processes that {ATOM_LAUNCHER} or activate() "
            "reaches; this has not run inside ATOM yet",
        ),
    )
    if backend and None not in (atom.version, atom.aiter, vllm.version):
        yield from first(
            "ATOM in vLLM",
            (
                WARNING,
                not installed.atom_entry_point,
                f"{ATOM_PLUGIN} is not among vLLM's plugins: {NO_SWITCH}",
                INSTALL,
            ),
        ) or _left_out("ATOM in vLLM", info, ATOM_PLUGIN, WARNING, f"; {NO_SWITCH}")


def _left_out(subject: str, info: SystemInfo, plugin: str, level: Level, effect: str = "") -> list[Diagnostic]:
    """Checks whether VLLM_PLUGINS keeps vLLM from a plugin: vLLM splits it at commas, and strips no blanks."""
    allowed = info.environment.get("VLLM_PLUGINS")
    names = [plugin] if allowed is None else allowed.split(",")
    return (
        []
        if plugin in names
        else first(
            subject,
            (
                level,
                plugin in map(str.strip, names),
                f"VLLM_PLUGINS='{allowed}' has a blank beside {plugin}: vLLM takes it for another name{effect}",
                "Take it out.",
            ),
            (
                level,
                True,
                f"VLLM_PLUGINS={allowed} does not name {plugin}{effect}",
                f"Unset it, or add {plugin} to it.",
            ),
        )
    )
