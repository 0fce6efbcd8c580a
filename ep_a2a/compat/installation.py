"""Gives modules of this package the import names of other libraries, in this process."""

import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from ep_a2a.compat.deep_ep_sizes import choose_edition
from ep_a2a.errors import AbsentModuleError, AbsentNameError, StateError, UnknownNameError

_MORI = "ep_a2a.compat.mori"
_AITER, _TRITON = "ep_a2a.compat.aiter", "ep_a2a.compat.triton_distributed"
_COMMUNICATORS = "aiter.dist.device_communicators"

MODULES = {
    "mori": {
        "mori": _MORI,
        "mori.ops": f"{_MORI}.ops",
        "mori.ops.dispatch_combine": f"{_MORI}.ops",
        "mori.ops.local_expert_count": f"{_MORI}.ops",
        "mori.shmem": f"{_MORI}.shmem",
        "mori.shmem.api": f"{_MORI}.shmem",
        "mori.shmem.tensor_utils": f"{_MORI}.shmem",
    },
    "aiter": {
        "aiter": _AITER,
        "aiter.dist.parallel_state": f"{_AITER}.parallel_state",
        f"{_COMMUNICATORS}.all2all": f"{_AITER}.managers",
        f"{_COMMUNICATORS}.base_device_communicator": f"{_AITER}.communicators",
        f"{_COMMUNICATORS}.communicator_cuda": f"{_AITER}.communicators",
    },
    "deep_ep": {"deep_ep": "ep_a2a.compat.deep_ep"},
    "triton_dist": {
        "triton_dist.layers.nvidia": _TRITON,
        "triton_dist.layers.nvidia.ep_ll_a2a_layer": _TRITON,
        "triton_dist.kernels.nvidia": f"{_TRITON}.kernels",
        "triton_dist.kernels.nvidia.low_latency_all_to_all_v2": f"{_TRITON}.kernels",
        "triton_dist.utils": f"{_TRITON}.utils",
    },
}
"""By library, which is also the name of its package: its modules, and ours that take their names.

Modules below one of ours are found below its new name, too.
"""

_OWN_KERNELS = "Call EPLowLatencyAllToAllLayer; kernels of your own can be written in Triton"
ABSENT = {
    "mori": "docs/mori.md lists what there is; the rest needs amd-mori in a process without install('mori').",
    "mori.cpp": "Use mori.ops and mori.shmem, which need no C++ module.",
    "aiter": "There are groups, communicators, managers and casts; docs/atom.md runs ep_a2a's ops beside AITER itself.",
    "aiter.fused_moe": "Run your own experts on the rows that dispatch returns; docs/atom.md runs AITER's.",
    "aiter.test_common": "Compare by torch.testing.assert_close, and measure by `ep-a2a bench`.",
    "deep_ep": "Use deep_ep.Buffer, which has both modes; docs/deepep.md lists what there is.",
    "deep_ep_cpp": "Import Config and EventHandle from deep_ep; deep_ep.Buffer needs no C++ module.",
    "triton_dist": "docs/triton_distributed.md lists what there is.",
    "triton_dist.jit": f"{_OWN_KERNELS} (triton.jit).",
    "triton_dist.language": f"{_OWN_KERNELS} (triton.language).",
    "triton_dist.profiler_utils": "Use EPLowLatencyAllToAllLayer(enable_profiling=True), or `ep-a2a bench`.",
    "triton_dist.test": "Compare by torch.testing.assert_close.",
}
"""Remedies for names that the libraries have and this package has not, also for the names below each."""

_replaced: dict[str, dict[str, ModuleType]] = {}
"""By installed library: its modules that were imported before."""

_their_names: dict[str, str] = {}
"""By module of ours that has a library's name: that name."""


def install(*libraries: str, replace: bool = False, deep_ep_edition: int | None = None) -> None:
    """Makes imports of other libraries in this process find this package's modules. Local; repeating it does nothing.

    Must be called on every rank before anything imports a library: a module that has imported another one keeps it. An
    error leaves all names as they were. Names that a library has and this package has not raise AbsentModuleError, an
    ImportError, or AbsentNameError, an AttributeError; importlib.util.find_spec raises the former, too.

    Args:
        libraries: out of "mori", "aiter", "deep_ep" and "triton_dist".
        replace: also take the names of libraries that are installed or imported already.
        deep_ep_edition: 2025 or 2026: of DeepEP's size hints and configs in this process; None leaves it as it is.

    Raises:
        UnknownNameError: this package has no such library's interface, or there is no such edition.
        StateError: a library is installed on this machine, or imported in this process.
    """
    _check_names(libraries)
    for library in libraries:
        found = None if _is_ours(library) else _place_of(library)
        if found is not None and not replace:
            raise StateError(
                f"no other {library} on this machine or in this process",
                found,
                "Uninstall it, or pass replace=True, before anything imports it, to use ep_a2a in its place.",
            )
    # every module, or an import below one of ours would load the same file a second time under the new name
    modules = {library: dict(_modules_of(library)) for library in libraries if not _is_ours(library)}
    if deep_ep_edition is not None:
        choose_edition(deep_ep_edition)
    for library in modules:
        _enter(library, modules[library])
    if _Absent not in sys.meta_path:
        sys.meta_path.append(_Absent)


def uninstall(*libraries: str) -> None:
    """Undoes `install`: imports find what they found before. Local.

    Args:
        libraries: as for `install`; those that are not installed are left alone.

    Raises:
        UnknownNameError: this package has no such library's interface. All names stay as they were.
    """
    _check_names(libraries)
    for library in libraries:
        if not _is_ours(library):
            continue
        for name in _names_of(library):
            del sys.modules[name]
        sys.modules.update(_replaced.pop(library))
        if library == "deep_ep":
            choose_edition(None)


def _check_names(libraries: tuple[str, ...]) -> None:
    for library in libraries:
        if library not in MODULES:
            raise UnknownNameError(f"out of {', '.join(MODULES)}", repr(library), field="libraries")


def _enter(library: str, modules: dict[str, ModuleType]) -> None:
    """Gives modules their new names, in place of all that the library has imported."""
    _replaced[library] = {name: sys.modules.pop(name) for name in _names_of(library)}
    for name, module in sorted(modules.items(), key=lambda item: (item[0] not in MODULES[library], item[0])):
        theirs = _their_names.setdefault(module.__name__, name)
        vars(module).setdefault("__getattr__", functools.partial(refuse_name, theirs))
        if not hasattr(module, "__path__"):
            # `from module import name` asks the finders for absent names of packages only
            module.__path__ = []
        parents = name.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            _add(".".join(parents[:depth]), None)
        _add(name, module)


def _add(name: str, module: ModuleType | None) -> None:
    """Enters a module, or for None an empty package unless there is one, and names it in its parent."""
    if module is None and name in sys.modules:
        return
    if module is None:
        module = importlib.util.module_from_spec(ModuleSpec(name, None, is_package=True))
        vars(module)["__getattr__"] = functools.partial(refuse_name, name)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def _modules_of(library: str) -> Iterator[tuple[str, ModuleType]]:
    for theirs, ours in MODULES[library].items():
        module = importlib.import_module(ours)
        yield theirs, module
        for info in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{ours}."):
            yield theirs + info.name.removeprefix(ours), importlib.import_module(info.name)


def _names_of(library: str) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == library]


def _is_ours(library: str) -> bool:
    return library in _replaced


def _place_of(library: str) -> str | None:
    """Returns where an import of the library would find it; None without one, and for a module of this package."""
    present = sys.modules.get(library)
    if getattr(present, "__name__", "").startswith("ep_a2a."):
        return None
    if present is not None:
        return f"one from {getattr(present, '__file__', None)}"
    spec = importlib.util.find_spec(library)
    # a folder without __init__.py has no origin: such as a clone beside the script, whose package lies deeper
    return None if spec is None or spec.origin is None else f"one at {spec.origin}"


def refuse_name(module: str, name: str) -> NoReturn:
    """Raises AbsentNameError for a name below a library's module; with the module bound, a module's `__getattr__`."""
    raise AbsentNameError(*_absence(f"{module}.{name}"))


class _Absent:
    """The last finder: says what to do about modules of installed libraries that nobody has found."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raises AbsentModuleError for such a module, named as the library's or below a module of ours."""
        module, _, last = name.rpartition(".")
        theirs = f"{_their_names[module]}.{last}" if module in _their_names else name
        library = theirs.partition(".")[0]
        if library in ABSENT and library.removesuffix("_cpp") in _replaced:
            raise AbsentModuleError(*_absence(theirs))


def _absence(name: str) -> tuple[str, str, str]:
    """Returns the parts of an error."""
    known = name
    while known not in ABSENT:
        known = known.rpartition(".")[0]
    return f"a module or name of {name.partition('.')[0]} that ep_a2a has", name, ABSENT[known]
