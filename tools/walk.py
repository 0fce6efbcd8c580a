"""Counts the files of ep_a2a and the Python functions that one call enters: what a reader of the call has to open.

python tools/walk.py dispatch      a warm op.dispatch
python tools/walk.py combine       a warm op.combine
python tools/walk.py get_handle    manager.get_handle of a new op, until the op is built
python tools/walk.py manager       a warm manager.dispatch

The call runs under a profile on rank 0 of `--ranks` processes on CPU, after the same calls have loaded all modules.
Every file of ep_a2a counts in which a Python function is called, and every call of a Python function, whosever it is.
Module bodies do not count as calls into a file. The launcher, CompiledKernel.interpret, is left out with all that it
calls: there Triton's interpreter runs device code.
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from ep_a2a.testing import RankContext

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = PROJECT / "ep_a2a"
CALLS = ("dispatch", "combine", "get_handle", "manager")
HIDDEN, TOPK, MAX_TOKENS, EXPERTS_PER_RANK = 64, 2, 8, 4


@dataclass
class Walk:
    """The functions that one call has entered.

    Attributes:
        functions: names of the functions called in each file of ep_a2a, both in order of first entry.
        num_calls: Python functions called, other packages' and resumed generators included.
    """

    functions: dict[str, list[str]] = field(default_factory=dict)
    num_calls: int = 0

    @property
    def files(self) -> list[str]:
        """Paths relative to ep_a2a, in order of first entry."""
        return list(self.functions)


def record(call: Callable[[], Any]) -> Walk:
    """Make the call under a profile of this thread."""
    from ep_a2a.kernels.compiled_kernel import CompiledKernel

    walk = Walk()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or path == Path(__file__):
            return
        walk.num_calls += 1
        if path.is_relative_to(PACKAGE) and frame.f_code.co_name != "<module>":
            names = walk.functions.setdefault(path.relative_to(PACKAGE).as_posix(), [])
            if frame.f_code.co_qualname not in names:
                names.append(frame.f_code.co_qualname)

    with mock.patch.object(CompiledKernel, "interpret", without_profile(CompiledKernel.interpret)):
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
    return walk


def without_profile(function: Callable[..., None]) -> Callable[..., None]:
    """The function, not looked into by the profile of its caller."""

    def run(*args: Any, **kwargs: Any) -> None:
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            function(*args, **kwargs)
        finally:
            sys.setprofile(profile)

    return run


def walk_of(context: RankContext, what: str) -> Walk | None:
    """Make the calls that `what` needs, and profile it on rank 0. Collective. None on other ranks."""
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
    found: list[Walk] = []

    def make(name: str, call: Callable[[], Any]) -> Any:
        """The call's result; profiled where it has the name of the walk."""
        if name != what or context.rank != 0:
            return call()
        results: list[Any] = []
        found.append(record(lambda: results.append(call())))
        return results[0]

    def take_step(op: Any, manager: Any, *, is_walked: bool) -> None:
        dispatch, combine, _, by_manager = CALLS if is_walked else ("", "", "", "")
        result = make(dispatch, lambda: op.dispatch(tokens, weights, None, ids))
        rows = result.tokens.clone()
        make(combine, lambda: op.combine(rows, None, ids))
        received, *_ = make(by_manager, lambda: manager.dispatch(tokens, weights, ids))
        manager.combine(received)

    # the second manager finds all modules loaded, and its second step is warm
    for name in ("", "get_handle"):
        with create_manager("ep_a2a", context.group) as manager:
            manager.device = torch.device("cpu")
            op = make(name, functools.partial(manager.get_handle, kwargs))
            take_step(op, manager, is_walked=False)
            take_step(op, manager, is_walked=name == "get_handle")
    return found[0] if found else None


def report(what: str, walk: Walk) -> str:
    """The walk in words."""
    lines = [f"{what}: {len(walk.files)} files of ep_a2a, {walk.num_calls} calls of Python functions"]
    lines += [f"{number:3} {file}: {', '.join(walk.functions[file])}" for number, file in enumerate(walk.files, 1)]
    return "\n".join(lines)


def main() -> None:
    """Print the walk named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=CALLS)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    options = parser.parse_args()
    from ep_a2a.testing import RankPool
    from tools import walk  # ranks import it by this name

    with RankPool(options.ranks) as pool:
        print(report(options.what, pool.run(walk.walk_of, options.what)[0]))


if __name__ == "__main__":
    sys.path.insert(0, str(PROJECT))
    main()
