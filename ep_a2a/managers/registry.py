"""Registry of backends by name. A backend is imported when somebody asks for it.

The doctor checks names where torch is absent, so this module imports none.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ep_a2a.errors import ConfigError, UnknownNameError, did_you_mean, shown

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ep_a2a.managers.base import All2AllManagerBase

Creator = Callable[..., "All2AllManagerBase"]
"""Called as creator(cpu_group, tcp_store_group=...)."""

_targets: dict[str, str | Creator] = {}
_names: dict[str, str] = {}
_lock = threading.RLock()


def register_manager(name: str, target: str | Creator, *, aliases: tuple[str, ...] = (), replace: bool = False) -> None:
    """Makes a backend available by name in this process; do it on every rank.

    Args:
        name: the backend's name.
        target: the manager class, any callable with the arguments (cpu_group, tcp_store_group=None), or
            "module:Class", which is imported when the backend is first used.
        aliases: further names of the same backend.
        replace: allows a name that is taken already.

    Raises:
        ConfigError: a name is taken, or the target is neither callable nor "module:Class".
    """
    if not callable(target) and not _is_import_path(target):
        raise ConfigError('a callable or "module:Class"', repr(target))
    with _lock:
        taken = [one for one in (name, *aliases) if one in _names]
        if taken and not replace:
            raise ConfigError(
                "backend names that are not taken", ", ".join(map(repr, taken)), "Use another name, or replace=True."
            )
        _targets[name] = target
        _names.update(dict.fromkeys((name, *aliases), name))


def available_backends() -> tuple[str, ...]:
    """Returns the names that `create_manager` takes, without aliases, in the order of registration."""
    with _lock:
        return tuple(_targets)


def check_backend_name(name: str) -> None:
    """Raises UnknownNameError, which lists the names, unless `name` is a backend's name or alias."""
    with _lock:
        if name not in _names:
            known = ", ".join(map(repr, _targets))
            remedy = did_you_mean(name, _names) or UnknownNameError.remedy
            raise UnknownNameError(f"out of {known}", shown(name), remedy, field="backend")


def create_manager(name: str, cpu_group: ProcessGroup, tcp_store_group: Any = None) -> All2AllManagerBase:
    """Returns a manager of backend `name`. Allocates no device memory; to be called on every rank of the group.

    Args:
        name: a backend's name or alias.
        cpu_group: the expert-parallel group; must support CPU tensors (gloo).
        tcp_store_group: handed to the manager; vLLM's elastic groups pass one.

    Raises:
        UnknownNameError: no such backend; the error lists the backends.
        MissingPackageError: the backend wraps a package that is not installed.
    """
    # the names of backends are known without torch
    from ep_a2a.memory.rendezvous import telling_before_the_first_meeting

    with telling_before_the_first_meeting(cpu_group):
        return _creator(name)(cpu_group, tcp_store_group=tcp_store_group)


def manager_type(name: str) -> type[All2AllManagerBase] | None:
    """Returns the class of backend `name`, or None where the registered target is no class.

    Raises:
        UnknownNameError: no such backend.
    """
    creator = _creator(name)
    return creator if isinstance(creator, type) else None


def aliases_of(name: str) -> tuple[str, ...]:
    """Returns the other names of a backend."""
    with _lock:
        return tuple(alias for alias, target in _names.items() if target == name and alias != name)


def _is_import_path(target: object) -> bool:
    return isinstance(target, str) and all(part.strip() for part in target.partition(":"))


def _creator(name: str) -> Creator:
    """Returns the class or function that makes managers of a backend, imported; raises UnknownNameError."""
    with _lock:
        check_backend_name(name)
        target = _targets[_names[name]]
    if not isinstance(target, str):
        return target
    module_name, _, attribute = target.partition(":")
    creator: Creator = getattr(importlib.import_module(module_name), attribute)
    return creator


_EXTERNAL = "ep_a2a.managers.external"
register_manager("ep_a2a", "ep_a2a.managers.native:NativeAll2AllManager")
register_manager("naive", "ep_a2a.managers.collective:NaiveAll2AllManager")
register_manager("allgather_reducescatter", "ep_a2a.managers.collective:AllGatherReduceScatterAll2AllManager")
register_manager("mori", f"{_EXTERNAL}.mori:MoriAll2AllManager", aliases=("mori_high_throughput",))
register_manager("mori_low_latency", f"{_EXTERNAL}.mori:MoriLowLatencyAll2AllManager")
register_manager("deepep_high_throughput", f"{_EXTERNAL}.deepep:DeepEPHighThroughputAll2AllManager")
register_manager("deepep_low_latency", f"{_EXTERNAL}.deepep:DeepEPLowLatencyAll2AllManager")
register_manager("deepep_v2", f"{_EXTERNAL}.deepep:DeepEPV2All2AllManager")
register_manager("pplx", f"{_EXTERNAL}.pplx:PplxAll2AllManager")
register_manager("flashinfer_nvlink_one_sided", f"{_EXTERNAL}.flashinfer:FlashInferOneSidedAll2AllManager")
register_manager(
    "flashinfer_nvlink_two_sided",
    f"{_EXTERNAL}.flashinfer:FlashInferTwoSidedAll2AllManager",
    aliases=("flashinfer_all2allv",),
)
