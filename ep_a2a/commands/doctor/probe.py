"""Describes this machine as a SystemInfo, without judging it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ep_a2a
from ep_a2a import env
from ep_a2a.commands.doctor.checks_backend import stands_on_library
from ep_a2a.commands.doctor.probe_host import find_host, find_rdma_ports
from ep_a2a.commands.doctor.probe_nvidia import add_nvidia_smi
from ep_a2a.commands.doctor.probe_packages import find_atom, find_installation, find_vllm
from ep_a2a.commands.doctor.subprocess_probe import PROBE_SECS, run_probe
from ep_a2a.commands.doctor.system_info import Backend, Driver, Gpu, Sharing, SystemInfo, Torch, Triton
from ep_a2a.errors import EnvironmentVariableError
from ep_a2a.managers.capabilities import Capabilities


def find_system_info(probe_secs: float = PROBE_SECS, backend: str = "") -> SystemInfo:
    """Returns the description of the machine that this process runs on.

    Args:
        probe_secs: seconds that a library may take to import.
        backend: name of the requested backend, "" for none.
    """
    with ThreadPoolExecutor() as asking:
        found_backend = asking.submit(find_backend, backend, probe_secs)
        torch, triton, driver = asking.map(lambda name: run_probe(name, probe_secs), ("torch", "triton", "driver"))
    found_triton = Triton(**triton)
    # A program that crashes leaves "?" for a version; nvidia-smi knows the driver's.
    gpus = tuple(Gpu(**gpu) for gpu in driver.get("gpus", ()))
    return SystemInfo(
        installation=find_installation(),
        torch=Torch(**torch),
        triton=found_triton,
        driver=add_nvidia_smi(Driver(**{**driver, "version": None, "gpus": gpus})),
        sharing=find_sharing(probe_secs) if gpus else Sharing(),
        host=find_host(found_triton.cache_directory),
        rdma=find_rdma_ports(),
        vllm=find_vllm(),
        atom=find_atom(),
        backend=found_backend.result(),
        environment=env.variables_for_doctor(),
        variable_problems=find_variable_problems(),
    )


def find_sharing(probe_secs: float = PROBE_SECS) -> Sharing:
    """Returns how ranks would share a GPU of this machine; unknown where torch does not import."""
    found = run_probe("sharing", probe_secs, str(Path(ep_a2a.__file__).parent))
    return Sharing() if "problem" in found else Sharing(**found)


def find_backend(name: str, probe_secs: float = PROBE_SECS) -> Backend:
    """Describes a backend from what its manager declares and what its library says."""
    if not stands_on_library(name):
        return Backend(name)
    folder = str(Path(ep_a2a.__file__).parent)
    with ThreadPoolExecutor() as asking:
        declared, library = asking.map(
            lambda probe: run_probe(probe, probe_secs, folder, name), ("declaration", "library")
        )
    if "capabilities" not in declared:
        return Backend(name, declaration_problem=declared["problem"])
    return Backend(name, **{**declared, **library, "capabilities": Capabilities(**declared["capabilities"])})


def find_variable_problems() -> dict[str, str]:
    """Returns, by name, why the text of a variable of this package cannot be used."""
    problems = {}
    for variable in env.VARIABLES:
        try:
            variable.get()
        except EnvironmentVariableError as error:
            problems[variable.name] = f"expected {error.expected}; got {error.got}"
    return problems
