"""Checks of the engines that use this package as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Case, Check, Level, always, the_machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ep_a2a.commands.doctor.system_info import SystemInfo

PLUGIN = "ep_a2a"
ATOM_PLUGIN = "ep_a2a_atom"
ATOM_LAUNCHER = "ep_a2a.integrations.atom.serve"
INSTALL = "Install this package in vLLM's environment: pip install ep-a2a"
NO_SWITCH = "the switch does not reach ATOM as vLLM's plugin"


def _usable_vllm(info: SystemInfo) -> Iterable[SystemInfo]:
    return (info,) if info.vllm.version is not None and not info.vllm.version_problem else ()


def _switched_atom_in_vllm(info: SystemInfo) -> Iterable[SystemInfo]:
    """The machine, where EP_A2A_BACKEND switches ATOM and vLLM may have ATOM as its plugin."""
    has_both = info.atom.version is not None and info.atom.aiter is not None and info.vllm.version is not None
    return (info,) if has_both and info.environment.get(env.BACKEND.name) else ()


def _left_out(info: SystemInfo, plugin: str) -> Iterator[tuple[str, str, bool]]:
    """(VLLM_PLUGINS, the plugin, whether a blank stands beside it), where the variable keeps vLLM from the plugin.

    vLLM splits the variable at commas, and strips no blanks from the names.
    """
    allowed = info.environment.get("VLLM_PLUGINS")
    names = [] if allowed is None else allowed.split(",")
    if allowed is not None and plugin not in names:
        yield allowed, plugin, plugin in [name.strip() for name in names]


def _left_out_cases(level: Level, effect: str = "") -> tuple[Case, Case]:
    blank = "VLLM_PLUGINS='{it[0]}' has a blank beside {it[1]}: vLLM takes it for another name"
    return (
        Case(level, lambda it: it[2], f"{blank}{effect}", "Take it out."),
        Case(level, always, f"VLLM_PLUGINS={{it[0]}} does not name {{it[1]}}{effect}",
             "Unset it, or add {it[1]} to it."),
    )  # fmt: skip


ENGINES = (
    Check("vLLM", lambda info: (info.vllm,),
        Case(NOTE, lambda it: it.version is None, "not in this environment"),
        Case(ERROR, lambda it: it.version_problem, "{it.version_problem}",
             "Install a supported vLLM, or use another --all2all-backend."),
        Case(ERROR, lambda it: it.differences, "{it.version}, in which {it.differences:listed}",
             "Install a supported vLLM, or an ep-a2a that knows this one."),
        Case(OK, always, "{it.version}; all that the plugin stands on is as it knows it")),
    Check("vLLM's plugins", _usable_vllm,
        Case(ERROR, lambda it: not it.installation.vllm_entry_point,
             "ep_a2a is not among them: vLLM will say that the backend's name is unknown", INSTALL)),
    Check("vLLM's plugins", lambda info: [each for usable in _usable_vllm(info) for each in _left_out(usable, PLUGIN)],
        *_left_out_cases(ERROR)),
    Check("ATOM", the_machine,
        Case(NOTE, lambda it: not it.atom.versions, "not in this environment"),
        Case(NOTE, lambda it: it.atom.version is None, "not in this environment; {it.atom.versions}"),
        Case(ERROR, lambda it: it.atom.aiter is None,
             "{it.atom.versions}, without AITER, from which it takes its managers", "Install AITER."),
        Case(NOTE, lambda it: not it.environment.get(env.BACKEND.name),
             f"{{it.atom.versions}}; it runs as it is, since {env.BACKEND.name} is not set",
             f"To change that: {env.BACKEND.name}=BACKEND python -m {ATOM_LAUNCHER} MODULE ... (docs/atom.md)"),
        Case(NOTE, always,
             f"{{it.atom.versions}}; {env.BACKEND.name}={{it.environment[{env.BACKEND.name}]}} is for processes that "
             f"{ATOM_LAUNCHER} or activate() reaches; this has not run inside ATOM yet")),
    Check("ATOM in vLLM", _switched_atom_in_vllm,
        Case(WARNING, lambda it: not it.installation.atom_entry_point,
             f"{ATOM_PLUGIN} is not among vLLM's plugins: {NO_SWITCH}", INSTALL)),
    Check("ATOM in vLLM", lambda info: [
            each for switched in _switched_atom_in_vllm(info) if switched.installation.atom_entry_point
            for each in _left_out(switched, ATOM_PLUGIN)
        ],
        *_left_out_cases(WARNING, f"; {NO_SWITCH}")),
)  # fmt: skip
