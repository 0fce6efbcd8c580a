"""Print what a library says of itself. Runs as a program of its own, since a library may crash or hang.

    ask.py torch                          fields of Machine about torch, its GPUs and the CUDA driver
    ask.py triton                         fields of Machine about Triton and its cache
    ask.py backend FOLDER BACKEND RANKS   fields of Choice

Each line of facts is MARK and a Python dictionary; the last one has `{name}_problem` or `problems`. FOLDER is the one
that the package ep_a2a lies in, RANKS those of each node, as in "8,8". What a backend's manager says is printed before
its library is imported, which may hang.
"""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from typing import Any

Facts = dict[str, Any]

MARK = "ep_a2a_facts:"
WAYS = {"peer access": 2, "native atomics": 3}
"""Ways to reach another GPU's memory, as CUdevice_P2PAttribute of cuda.h."""
EXPERTS_PER_RANK, TOKENS = 32, 128
"""Of a rank: as many as every backend takes."""


def library_facts(name: str) -> Facts:
    """Return what torch or triton says; its version is None where it is absent, missing where its import fails."""
    try:
        package = importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - whatever a broken library raises is the answer
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return {name: None, f"{name}_problem": ""}
        return {f"{name}_problem": f"{type(error).__name__}: {error}"}
    if not hasattr(package, "__version__"):
        return {f"{name}_problem": f"the folder {list(package.__path__)} stands in its place"}
    more = _gpu_facts(package) if name == "torch" else {"triton_cache": str(package.knobs.cache.dir)}
    return {name: str(package.__version__), f"{name}_problem": "", **more}


def _gpu_facts(torch: Any) -> Facts:
    said: Facts = {"cuda_build": torch.version.cuda, "hip_build": torch.version.hip}
    if not (torch.version.cuda or torch.version.hip):
        return said
    try:
        # Unlike device_count, it makes a context: a driver that only half works fails here.
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001
        return said | {"gpu_problem": str(error).strip().partition("\n")[0]}
    numbers = range(torch.cuda.device_count())
    said["num_gpus"] = len(numbers)
    if torch.version.cuda:
        gpus = [torch.cuda.get_device_properties(number) for number in numbers]
        said["gpus"] = [(gpu.name, (gpu.major, gpu.minor), gpu.multi_processor_count, gpu.total_memory) for gpu in gpus]
        said["unreachable"] = _unreachable(numbers)
    return said


def _unreachable(numbers: range) -> dict[str, tuple[str, ...]]:
    """Return by way the pairs of GPUs, as "0 and 1", of which one does not reach the other's memory."""
    driver = ctypes.CDLL("libcuda.so.1")

    def is_missing(attribute: int, a: int, b: int) -> bool:
        answer = ctypes.c_int(0)
        driver.cuDeviceGetP2PAttribute(ctypes.byref(answer), attribute, a, b)
        return not answer.value

    pairs = [(a, b) for b in numbers for a in range(b)]
    return {
        way: tuple(f"{a} and {b}" for a, b in pairs if is_missing(each, a, b) or is_missing(each, b, a))
        for way, each in WAYS.items()
    }


def backend_facts(folder: str, name: str, ranks_per_node: str) -> Iterator[Facts]:
    """Yield what a backend's manager says of a request, then why the backend cannot be used here.

    Args:
        folder: where the package ep_a2a lies. name: of the backend.
        ranks_per_node: ranks of each node, with commas between.
    """
    try:
        # The same package as in the process that asks, whatever the import path has.
        sys.path.insert(0, folder)
        importlib.import_module("ep_a2a")
        sys.path.pop(0)
        import torch

        from ep_a2a.managers.capabilities import problems
        from ep_a2a.managers.registry import manager_type

        manager = manager_type(name)
        if manager is None:
            raise LookupError("it has no manager class")
        yield request_facts(manager, list(map(int, ranks_per_node.split(","))))
        yield {"problems": problems(manager, "cuda" if torch.cuda.is_available() else "cpu")}
    except BaseException as error:  # noqa: BLE001 - whatever a broken torch raises is the answer
        yield {"problems": (f"{type(error).__name__}: {error}",)}


def request_facts(manager: Any, ranks_per_node: list[int]) -> Facts:
    """Return what a manager says of so many ranks: its kernel, and why it refuses them.

    Args:
        manager: the backend's class.
        ranks_per_node: ranks of each node.
    """
    from ep_a2a.commands.plan.command import plan_op

    num_nodes, num_ranks = len(ranks_per_node), sum(ranks_per_node)
    kernel, reason = manager.kernel_for(num_nodes, None)
    found: Facts = {"kernel": kernel, "kernel_reason": reason}
    sizes = {"max_tokens": TOKENS, "experts": EXPERTS_PER_RANK * num_ranks, "layout": manager.capabilities.layouts[0]}
    config = plan_op(ranks=num_ranks, **sizes)[0].config
    if refusal := manager.capabilities.refusal(manager.backend, config, num_nodes):
        found |= {"refusal": f"expected {refusal.expected}; got {refusal.got}", "remedy": refusal.remedy}
    return found


if __name__ == "__main__":
    asked, *arguments = sys.argv[1:]
    for facts in backend_facts(*arguments) if asked == "backend" else [library_facts(asked)]:
        sys.stdout.write(f"\n{MARK}{facts!r}\n")
        sys.stdout.flush()
