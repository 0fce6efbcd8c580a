"""Lists the files of ep_a2a that one call enters, in order: what a reader of the call has to open.

python tools/walk.py dispatch      a warm op.dispatch, up to the launch of its kernel
python tools/walk.py combine       a warm op.combine, likewise
python tools/walk.py get_handle    manager.get_handle of a new op, until the op is built
python tools/walk.py manager       a warm manager.dispatch
python tools/walk.py vllm          from vLLM's flag to op.dispatch, by name: vLLM need not be installed

All but `vllm` profile rank 0 of `--ranks` processes on CPU, after calls that have loaded all modules. Every file of
ep_a2a counts of which a Python function is called. Module bodies do not count, nor kernels, which the interpreter runs.

Three numbers are printed. `files` are all. `without leaves` leaves out those of which no function, in this call, calls
another file: they check, compute or format something and return. Reading a property is no such call. `on the way` are
the files that wait for the call to reach its goal: functions of theirs are on the stack when a function of GOALS is
entered. A reader who follows the call reads these, and opens the others for details.

`vllm` checks by AST that each function of STEPS names the next one. Leaves beside that way are not listed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from ep_a2a.testing import RankContext

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = PROJECT / "ep_a2a"
MODULE_BODY = "<module>"
LAUNCH = ("kernels/compiled_kernel.py", "interpret")
"""Runs a kernel in Triton's interpreter: below it device code runs."""
GOALS = {
    "dispatch": (LAUNCH,),
    "combine": (LAUNCH,),
    "manager": (LAUNCH,),
    "get_handle": (
        ("topology/classification.py", "classify"),  # where the ranks run
        ("config/handle_kwargs.py", "config_from_handle_kwargs"),  # the kwargs have become a config
        ("memory/arena.py", "acquire"),  # the op has memory
        ("ops/memory.py", "initialize"),  # the memory is bound, and in its first state
        ("ops/intra_node.py", "compile"),  # the kernels are compiled
    ),
}
"""What each call is to reach: (file, function)."""
HIDDEN, TOPK, MAX_TOKENS, EXPERTS_PER_RANK = 64, 2, 8, 4


class Step(NamedTuple):
    """One function on the way from vLLM's flag to `op.dispatch`.

    Attributes:
        file: relative to ep_a2a. function: its name there.
        names: what its body must name: the next step's function, or what vLLM calls the next step by.
    """

    file: str
    function: str
    names: str


VLLM = "integrations/vllm"
STEPS = (
    Step(f"{VLLM}/plugin.py", "register", "_add_name"),
    Step(f"{VLLM}/plugin.py", "_add_name", "choose"),
    Step(f"{VLLM}/parallel_config.py", "choose", "activate"),
    Step(f"{VLLM}/parallel_config.py", "activate", "COMMUNICATOR_FACTORY"),
    Step(f"{VLLM}/communicator.py", "make_communicator", "patch_prepare_finalize"),
    Step(f"{VLLM}/communicator.py", "all2all_manager", "VllmAll2AllManager"),
    Step(f"{VLLM}/communicator.py", "maybe_make_prepare_finalize", "make_prepare_finalize"),
    Step(f"{VLLM}/prepare_finalize.py", "make_prepare_finalize", "EpA2APrepareAndFinalize"),
    Step(f"{VLLM}/prepare_finalize.py", "post_init_setup", "wire_format"),
    Step(f"{VLLM}/wire.py", "handle_kwargs", "max_num_tokens"),
    Step(f"{VLLM}/prepare_finalize.py", "post_init_setup", "get_handle"),
    Step(f"{VLLM}/manager.py", "get_handle", "get_handle"),
    Step(f"{VLLM}/prepare_finalize.py", "prepare", "dispatch"),
)
"""In the order in which a process of vLLM comes to them."""


@dataclass
class Walk:
    """What one call has entered.

    Attributes:
        files: relative to ep_a2a, in order of first entry.
        functions: names of the functions called in each file, in order.
        callers: files that have called a function of another file.
        on_the_way: files with a function that waited for a goal, and the goals' files.
        num_calls: Python functions called, whosever they are, resumed generators included.
    """

    files: list[str] = field(default_factory=list)
    functions: dict[str, list[str]] = field(default_factory=dict)
    callers: set[str] = field(default_factory=set)
    on_the_way: set[str] = field(default_factory=set)
    num_calls: int = 0

    @property
    def without_leaves(self) -> list[str]:
        """The files that have called another, and the goals' files."""
        return [file for file in self.files if file in self.callers | self.on_the_way]


def record(call: Callable[[], Any], goals: tuple[tuple[str, str], ...] = (LAUNCH,)) -> Walk:
    """Makes the call under a profile of this thread."""
    from ep_a2a.kernels.portable import PortableFunction

    walk = Walk()
    # of every Python frame in the call: its file in ep_a2a, or None
    stack: list[str | None] = []
    launches = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal launches
        if event == "call":
            file = file_of(frame.f_code)
            caller = next((each for each in reversed(stack) if each is not None), None)
            stack.append(file)
            if launches == 0:
                walk.num_calls += 1
                if file is not None and frame.f_code.co_name != MODULE_BODY:
                    note(walk, file, frame.f_code.co_qualname, None if is_property(frame) else caller)
                if (file, frame.f_code.co_name) in goals:
                    walk.on_the_way.update(each for each in stack if each is not None)
            launches += is_launch(frame.f_code)
        elif event == "return" and stack:
            stack.pop()
            launches -= is_launch(frame.f_code)

    with mock.patch.object(PortableFunction, "interpret", unprofiled(PortableFunction.interpret)):
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
    return walk


def unprofiled(function: Callable[..., None]) -> Callable[..., None]:
    """The function without the profile of its caller: device code is not looked at, and makes most of the calls."""

    def run(*args: Any, **kwargs: Any) -> None:
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            function(*args, **kwargs)
        finally:
            sys.setprofile(profile)

    return run


def note(walk: Walk, file: str, function: str, caller: str | None) -> None:
    """Adds one call of a function of the package."""
    if file not in walk.functions:
        walk.files.append(file)
        walk.functions[file] = []
    if function not in walk.functions[file]:
        walk.functions[file].append(function)
    if caller is not None and caller != file:
        walk.callers.add(caller)


def file_of(code: CodeType) -> str | None:
    """The file of a function, relative to ep_a2a; None for other projects'."""
    path = Path(code.co_filename)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


def is_property(frame: FrameType) -> bool:
    """Whether the function was defined as a property of a class of its module."""
    owner, _, name = frame.f_code.co_qualname.rpartition(".")
    attribute = getattr(frame.f_globals.get(owner), "__dict__", {}).get(name)
    return isinstance(attribute, property | functools.cached_property)


def is_launch(code: CodeType) -> bool:
    """Whether a function runs a kernel."""
    return code.co_name == LAUNCH[1] and file_of(code) == LAUNCH[0]


def walk_of(context: RankContext, what: str) -> Walk | None:
    """Makes the calls that `what` needs, and profiles it on rank 0. Collective."""
    import torch

    from ep_a2a.managers.registry import create_manager

    kwargs = {
        "rank": context.rank,
        "num_ep_ranks": context.world_size,
        "input_dtype": torch.bfloat16,
        "quant_dtype": torch.bfloat16,
        "token_hidden_size": HIDDEN,
        "scale_dim": 0,
        "scale_type_size": 0,
        "max_num_tokens_per_dp_rank": MAX_TOKENS,
        "num_local_experts": EXPERTS_PER_RANK,
        "num_experts_per_token": TOPK,
    }
    tokens = torch.ones(MAX_TOKENS // 2, HIDDEN, dtype=torch.bfloat16)
    weights = torch.full((MAX_TOKENS // 2, TOPK), 0.5)
    ids = torch.arange(TOPK, dtype=torch.int32).expand(MAX_TOKENS // 2, TOPK).contiguous()
    found: dict[str, Walk] = {}

    def make(name: str, call: Callable[[], Any]) -> Any:
        """The call's result; profiled where it has the name of the walk."""
        results: list[Any] = []
        if name != what or context.rank != 0:
            return call()
        found[name] = record(lambda: results.append(call()), GOALS[name])
        return results[0]

    def take_step(op: Any, manager: Any, *names: str) -> None:
        dispatch, combine, by_manager = names
        result = make(dispatch, lambda: op.dispatch(tokens, weights, None, ids))
        rows = result.tokens.clone()
        make(combine, lambda: op.combine(rows, None, ids))
        rows, *_ = make(by_manager, lambda: manager.dispatch(tokens, weights, ids))
        manager.combine(rows)

    # the second manager finds all modules loaded, and its second step is warm
    for name in ("cold", "get_handle"):
        with create_manager("ep_a2a", context.group) as manager:
            manager.device = torch.device("cpu")
            op = make(name, functools.partial(manager.get_handle, kwargs))
            take_step(op, manager, "cold", "cold", "cold")
            take_step(op, manager, "dispatch", "combine", "manager")
    return found.get(what)


def walk_from_vllm(package: Path = PACKAGE) -> Walk:
    """The way of STEPS, each of which is looked up in its file.

    Raises:
        LookupError: a function is not there, or does not name the next.
    """
    walk = Walk()
    for step in STEPS:
        tree = ast.parse((package / step.file).read_text(encoding="utf-8"))
        bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == step.function]
        if not any(step.names in names_in(body) for body in bodies):
            raise LookupError(f"{step.file}: no function {step.function} that names {step.names}")
        note(walk, step.file, step.function, walk.files[-1] if walk.files else None)
    walk.on_the_way.update(walk.files)
    return walk


def names_in(body: ast.FunctionDef) -> set[str]:
    """Names and attributes that a function uses, and its parameters."""
    nodes = list(ast.walk(body))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}


def report(what: str, walk: Walk) -> str:
    """The walk in words."""
    lines = [
        f"{what}: {len(walk.files)} files of ep_a2a, {len(walk.without_leaves)} without leaves, "
        f"{len(walk.on_the_way)} on the way (*)"
    ]
    for number, file in enumerate(walk.files, 1):
        functions = ", ".join(name.replace(".<locals>.", ".") for name in walk.functions[file])
        mark = "*" if file in walk.on_the_way else " "
        lines.append(f"{number:3} {mark} {file}{'' if file in walk.without_leaves else ' (leaf)'}: {functions}")
    if walk.num_calls:
        lines.append(f"{walk.num_calls} calls of Python functions on the host")
    return "\n".join(lines)


def main() -> None:
    """Prints the walk named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("dispatch", "combine", "get_handle", "manager", "vllm"))
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    options = parser.parse_args()
    if options.what == "vllm":
        print(report(options.what, walk_from_vllm()))
        return
    from ep_a2a.testing import RankPool
    from tools import walk  # ranks import it by this name

    with RankPool(options.ranks) as pool:
        print(report(options.what, pool.run(walk.walk_of, options.what)[0]))


if __name__ == "__main__":
    sys.path.insert(0, str(PROJECT))
    main()
