"""Checks of the engines that use this package as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor.diagnostic import Finding, error, note, ok, warning

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.system_info import Machine

PLUGIN = "ep_a2a"
ATOM_PLUGIN = "ep_a2a_atom"
ATOM_LAUNCHER = "ep_a2a.integrations.atom.serve"


def check_vllm(machine: Machine) -> list[Finding]:
    """Whether vLLM's `--all2all-backend ep_a2a` will work."""
    vllm, installation = machine.vllm, machine.installation
    if vllm.version is None:
        return [note("vLLM", "not in this environment")]
    if vllm.version_problem:
        return [error("vLLM", vllm.version_problem, "Install a supported vLLM, or use another --all2all-backend.")]
    findings = []
    if vllm.differences:
        findings.append(
            error("vLLM", f"{vllm.version}, in which {'; '.join(vllm.differences)}",
                  "Install a supported vLLM, or an ep-a2a that knows this one.")
        )  # fmt: skip
    else:
        findings.append(ok("vLLM", f"{vllm.version}; all that the plugin stands on is as it knows it"))
    if not installation.vllm_entry_point:
        findings.append(
            error("vLLM's plugins", "ep_a2a is not among them: vLLM will say that the backend's name is unknown",
                  "Install this package in vLLM's environment: pip install ep-a2a")
        )  # fmt: skip
    if left_out := _left_out(machine, PLUGIN):
        findings.append(error("vLLM's plugins", *left_out))
    return findings


def _left_out(machine: Machine, plugin: str) -> tuple[str, str] | None:
    """How VLLM_PLUGINS keeps vLLM from a plugin, and the remedy; None where it does not.

    vLLM cuts the variable at commas and looks for the plugin's name among the parts as they are.
    """
    allowed = machine.environment.get("VLLM_PLUGINS")
    names = [] if allowed is None else allowed.split(",")
    if allowed is None or plugin in names:
        return None
    if plugin in [name.strip() for name in names]:
        return f"VLLM_PLUGINS='{allowed}' has a blank beside {plugin}: vLLM takes it for another name", "Take it out."
    return f"VLLM_PLUGINS={allowed} does not name {plugin}", f"Unset it, or add {plugin} to it."


def check_atom(machine: Machine) -> list[Finding]:
    """Whether ATOM's layers will use a backend of this package (docs/atom.md)."""
    atom = machine.atom
    if atom.version is None and atom.aiter is None:
        return [note("ATOM", "not in this environment")]
    found = ", ".join(
        f"{name} {version}" for name, version in (("ATOM", atom.version), ("AITER", atom.aiter)) if version
    )
    if atom.version is None:
        return [note("ATOM", f"not in this environment; {found}")]
    if atom.aiter is None:
        return [error("ATOM", f"{found}, without AITER, from which it takes its managers", "Install AITER.")]
    backend = machine.environment.get(env.BACKEND.name)
    if not backend:
        return [
            note("ATOM", f"{found}; it runs as it is, since {env.BACKEND.name} is not set",
                 f"To change that: {env.BACKEND.name}=BACKEND python -m {ATOM_LAUNCHER} MODULE ... (docs/atom.md)")
        ]  # fmt: skip
    said = f"{found}; {env.BACKEND.name}={backend} is for processes that {ATOM_LAUNCHER} or activate() reaches"
    return [note("ATOM", f"{said}; this has not run inside ATOM yet"), *_atom_as_plugin(machine)]


def _atom_as_plugin(machine: Machine) -> list[Finding]:
    """What keeps the switch from processes of vLLM in which ATOM is a plugin."""
    if machine.vllm.version is None:
        return []
    what = "the switch does not reach ATOM as vLLM's plugin"
    if not machine.installation.atom_entry_point:
        return [
            warning("ATOM in vLLM", f"{ATOM_PLUGIN} is not among vLLM's plugins: {what}",
                    "Install this package in vLLM's environment: pip install ep-a2a")
        ]  # fmt: skip
    if left_out := _left_out(machine, ATOM_PLUGIN):
        found, remedy = left_out
        return [warning("ATOM in vLLM", f"{found}; {what}", remedy)]
    return []
