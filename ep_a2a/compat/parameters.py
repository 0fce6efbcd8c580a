"""The table of parameters that do not act here as in the library whose interface they belong to.

parameters.toml is the table. The modules of ep_a2a.compat take the texts of their warnings and refusals from it, and
docs/arguments.md prints all.
"""

import enum
import functools
import logging
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, NoReturn, TypeVar

from ep_a2a import env
from ep_a2a.errors import UnsupportedError
from ep_a2a.log_once import log_once

logger = logging.getLogger(__name__)

T = TypeVar("T")
MORI_RDMA_DEVICES = "MORI_RDMA_DEVICES"


class Effect(enum.StrEnum):
    """The effect that a parameter has on the call that takes it; a row of the table names it in small letters.

    IGNORED: the call ignores the parameter, and serves its caller with every value.
    WARNED: the call ignores the parameter, and warns once per process of a value other than the default.
    REFUSED: the call raises an error with a remedy.
    """

    IGNORED = "no effect"
    WARNED = "warned of once"
    REFUSED = "refused"


@dataclass(frozen=True)
class Row:
    """Parameters of one or more callables that share one effect.

    Attributes:
        library: package below ep_a2a.compat.
        callables: names below that package, separated by spaces.
        parameters: names, separated by spaces; "" = the callables as a whole.
        effect: the effect that they have.
        text: the reason, or the remedy of a refusal.
        when: the values that the effect concerns; "" = all.
    """

    library: str
    callables: str
    parameters: str
    effect: Effect
    text: str
    when: str = ""


def _rows() -> tuple[Row, ...]:
    table = tomllib.loads(resources.files(__package__).joinpath("parameters.toml").read_text("utf-8"))
    rows = []
    for library, by_callables in table.items():
        for callables, given in by_callables.items():
            for each in given:
                effect = next(effect for effect in Effect if effect.name.lower() in each)
                parameters = each.pop(effect.name.lower())
                rows.append(Row(library, callables, parameters, effect, **each))
    return tuple(rows)


ROWS = _rows()


def remedy_of(library: str, function: str, parameter: str = "") -> str:
    """Returns the text of the row that warns of or refuses a parameter.

    Args:
        library: package below ep_a2a.compat.
        function: name below that package.
        parameter: its parameter; "" where the whole callable is refused.

    Raises:
        KeyError: there is none.
    """
    for row in ROWS:
        if (
            row.library == library
            and row.effect is not Effect.IGNORED
            and function in row.callables.split()
            and parameter in (row.parameters.split() or [""])
        ):
            return row.text
    raise KeyError((library, function, parameter))


def refused(library: str, function: str, parameter: str = "") -> UnsupportedError:
    """Returns the error for a callable, or for a value of its parameter, that only the library has.

    Args:
        library, function, parameter: as for remedy_of.
    """
    name = f"{library}.{function}"
    return UnsupportedError(
        f"a function or value that ep_a2a.compat.{library} offers",
        f"{parameter} of {name}" if parameter else f"{name}, which only the library itself has",
        remedy_of(library, function, parameter),
    )


class Refused:
    """Stands for a callable that only the library has. A call, or a launch `name[grid]`, raises UnsupportedError."""

    def __init__(self, library: str, function: str) -> None:
        self._library, self._function = library, function

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raises UnsupportedError with the remedy of the table."""
        raise refused(self._library, self._function)

    def __getitem__(self, _: object) -> NoReturn:
        self()


def refusals(library: str, owner: str) -> dict[str, Refused]:
    """Returns what stands for the callables of a library's module or class that the table refuses as a whole.

    Args:
        library: package below ep_a2a.compat.
        owner: name of the module or the class below that package.
    """
    names = [
        name
        for row in ROWS
        if (row.library, row.effect, row.parameters) == (library, Effect.REFUSED, "")
        for name in row.callables.split()
    ]
    return {name.rpartition(".")[2]: Refused(library, name) for name in names if name.rpartition(".")[0] == owner}


def with_refusals(library: str, owner: str) -> Callable[[type[T]], type[T]]:
    """Returns a decorator that gives a class its `refusals`, as methods."""

    def add(kind: type[T]) -> type[T]:
        for name, each in refusals(library, owner).items():
            setattr(kind, name, each)
        return kind

    return add


def take_mori_variables() -> None:
    """Gives EP_A2A_RDMA_DEVICES the value of MORI_RDMA_DEVICES, unless it has one, and warns of other MORI_* variables.

    Raises:
        EnvironmentVariableError: MORI_RDMA_DEVICES is not a list of devices.
    """
    taken = env.set_from(MORI_RDMA_DEVICES, env.RDMA_DEVICES)
    others = [name for name in env.set_with_prefix("MORI_") if not taken or name != MORI_RDMA_DEVICES]
    if others:
        log_once(logger, logging.WARNING, f"MORI on ep_a2a: {', '.join(others)} without effect; see docs/env.md.")


@functools.cache
def warn_once(library: str, function: str, *parameters: str) -> None:
    """Warns once per process that a callable makes no use of parameters it was given.

    Args:
        library: package below ep_a2a.compat.
        function: name below that package.
        parameters: those that were given.
    """
    if not parameters:
        return
    texts = dict.fromkeys(remedy_of(library, function, each) for each in parameters)
    logger.warning(
        "%s on ep_a2a: %s makes no use of %s. %s docs/arguments.md lists such arguments.",
        library,
        function,
        ", ".join(parameters),
        " ".join(texts),
        stacklevel=2,
    )
