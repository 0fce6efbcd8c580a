"""Options of the commands: how a command declares one, the options that several share, bounds of their values."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_a2a.errors import ConfigError, TopKError, UnknownNameError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import SimpleNamespace

MOST_HIDDEN = 1 << 20
MOST_PLANNED = 1 << 40
MOST_TOKENS = 1 << 24
MOST_EXPERTS = 1 << 16
MOST_TOPK = 1 << 10
MOST_RANKS = 1 << 12
MOST_PROCESSES = 1 << 10
MOST_ITERATIONS = 1 << 24
MOST_DIGITS = 18
MOST_SECS = 1e6
MOST_SEED = (1 << 31) - 1
"""Bounds of options: far above what any machine can do, so that a slip of the keyboard is an error at once."""


class Device(enum.StrEnum):
    """Values of --device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Quant(enum.StrEnum):
    """Values of --quant: casts inside dispatch that need nothing but the tokens."""

    NONE = "none"
    FP8_PER_TOKEN = "fp8_per_token"
    FP8_PER_1X128 = "fp8_per_1x128"
    MXFP8 = "mxfp8"


@dataclass(frozen=True)
class Option:
    """One row of a command's table of options.

    Attributes:
        name: of its value in the command's `run`. It is typed as `--name`, with dashes for underscores.
        kind: type of its value: int, float, str, Path, an enumeration, or bool for a flag.
        help: one sentence for `--help` and docs/cli.md.
        default: its value where it is not typed; None where the command decides.
        names: as typed, where that is not `--name`. A flag without them is typed as `--name` and `--no-name`.
        panel: heading under which `--help` lists it.
        limits: of its value, in typer's words: min and max of a number; exists, file_okay and dir_okay of a path.
        read: makes the value of the text that was typed; takes the option as typed and the text.
        is_argument: whether it is typed without a name.
    """

    name: str
    kind: Any
    help: str
    default: Any = None
    names: tuple[str, ...] = ()
    panel: str = "Options"
    limits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[str, str], Any] | None = None
    is_argument: bool = False

    @property
    def typed(self) -> tuple[str, ...]:
        """Returns its names on the command line; () of an argument."""
        if self.is_argument or self.names:
            return self.names
        plain = self.name.replace("_", "-")
        return (f"--{plain}", f"--no-{plain}") if self.kind is bool else (f"--{plain}",)

    @property
    def row(self) -> tuple[str, str, str]:
        """Returns what --help and docs/cli.md list: names and kind of value, default ("" for none), help."""
        kinds = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}
        if self.is_argument:
            shown = self.name.upper()
        elif issubclass(self.kind, enum.Enum):
            shown = f"{', '.join(self.typed)} {'|'.join(each.value for each in self.kind)}"
        else:
            shown = f"{', '.join(self.typed)} {kinds[self.kind]}".strip()
        return shown, "" if self.default in (None, False) else str(self.default), self.help


def number(name: str, text: str, most: int, default: int | None = None, *, least: int = 1, **more: Any) -> Option:
    """Returns an option that takes a whole number from `least` to `most`."""
    return Option(name, int, text, default, limits={"min": least, "max": most}, **more)


def numbers(name: str, text: str, most: int = MOST_TOKENS, default: str | None = None, **more: Any) -> Option:
    """Returns an option that takes whole numbers separated by commas; its value is a tuple."""
    return Option(name, str, text, default, read=lambda option, typed: read_numbers(option, typed, most), **more)


def names(name: str, text: str, default: str | None = None, **more: Any) -> Option:
    """Returns an option that takes names separated by commas, each once; its value is a tuple."""
    return Option(name, str, text, default, read=read_names, **more)


def flag(name: str, text: str, *typed: str, **more: Any) -> Option:
    """Returns an option without a value, False unless it is typed: as `--name`, or as named."""
    return Option(name, bool, text, False, typed or (f"--{name.replace('_', '-')}",), **more)


def file(name: str, text: str, **more: Any) -> Option:
    """Returns an option that takes a path which is no folder."""
    return Option(name, Path, text, limits={"dir_okay": False}, **more)


QUIET = flag("quiet", "Print results only: no notes, no progress.", "-q", "--quiet")
VERBOSE = flag("verbose", "Print details; log at INFO unless the level is set.", "-v", "--verbose")
OF_ALL_COMMANDS = (QUIET, VERBOSE)
"""Every command has these behind its own."""
AS_JSON = flag("as_json", "Print one JSON object and nothing else.", "--json")
OUTPUT = Option("output", Path, "Write what --json prints to this file.")
SEED = number("seed", "Seed of all that is random.", MOST_SEED, least=0)
DEVICE = Option("device", Device, "auto takes GPUs where there are any.", Device.AUTO)
QUANT = Option("quant", Quant, "Cast inside dispatch.", Quant.NONE)

OPTIONS_OF_FIELDS = {
    "hidden_dim": ("hidden",),
    "intermediate_dim": ("intermediate",),
    "token_hidden_size": ("hidden",),
    "num_experts_per_token": ("topk",),
    "num_experts": ("experts",),
    "num_local_experts": ("experts",),
    "num_experts_per_rank": ("experts",),
    "num_tokens": ("tokens", "max_tokens"),
    "max_num_tokens": ("max_tokens", "tokens"),
    "max_num_tokens_per_dp_rank": ("max_tokens", "tokens"),
    "max_num_inp_token_per_rank": ("max_tokens", "tokens"),
    "world_size": ("ranks",),
    "num_ep_ranks": ("ranks",),
    "num_nodes": ("nodes",),
    "num_credits": ("credits",),
    "gpu_per_node": ("gpus_per_node",),
    "quant_type": ("quant",),
    "dispatch_quant_type": ("quant",),
}
"""Options that set a field of a configuration or workload, where the names differ. A command's first one is named in
errors about the field."""


def values_of_fields(options: SimpleNamespace, fields: Iterable[str]) -> dict[str, Any]:
    """Returns the values of a command's options for fields of a workload, by field."""
    return {field: getattr(options, OPTIONS_OF_FIELDS.get(field, (field,))[0]) for field in fields}


def option_of_field(table: Iterable[Option], field: str) -> str:
    """Returns the option of a command's table that sets a field, as it is typed; the field where there is none."""
    typed = {each.name: each.typed[0] for each in table if each.typed}
    return next((typed[name] for name in OPTIONS_OF_FIELDS.get(field, (field,)) if name in typed), field)


def read_names(option: str, text: str) -> tuple[str, ...]:
    """Returns names separated by commas.

    Raises:
        ConfigError: there is none, or one appears twice.
    """
    parts = _parts(text)
    if not parts or len(set(parts)) < len(parts):
        raise ConfigError("to be one name or more, each once, separated by commas", shown(text), field=option)
    return parts


def read_numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    """Returns whole numbers separated by commas.

    Raises:
        ConfigError: there is none, or something between commas is no number from 0 to `most`.
    """
    parts = _parts(text)
    if not parts or not all(p.isdecimal() and len(p) <= MOST_DIGITS and int(p) <= most for p in parts):
        expected = f"to be numbers separated by commas, each from 0 to {most}"
        raise ConfigError(expected, shown(text), field=option)
    return tuple(map(int, parts))


def read_bounds(option: str, text: str) -> tuple[int, ...]:
    """Returns numbers separated by commas, each once."""
    read_names(option, text)
    return read_numbers(option, text, MOST_TOKENS)


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def refuse(options: Mapping[str, Any], when: str, remedy: str) -> None:
    """Raises ConfigError where any of the options is given; `options` holds their values by name."""
    named = ", ".join(f"--{name.replace('_', '-')}" for name in given(options))
    if named:
        raise ConfigError(f"no {named} {when}", named, remedy)


def check_topk(topk: int, num_experts: int) -> None:
    """Raises TopKError unless there are enough experts."""
    if topk > num_experts:
        raise TopKError(f"<= {num_experts}, the number of experts", str(topk), "Lower --topk.", field="topk")


def named_backend(option: str | None, config_file: str | None = None) -> tuple[str, str]:
    """Returns the name of the backend and who chose it, in the order of config.file.choose_backend.

    Raises:
        UnknownNameError: there is no such backend. ConfigError: the config file is wrong.
    """
    from ep_a2a import env
    from ep_a2a.config.file import choose_backend, read_config_file
    from ep_a2a.managers.registry import check_backend_name

    name = choose_backend(option, config_file)
    try:
        check_backend_name(name)
    except UnknownNameError as error:
        error.field = f"--backend or {env.BACKEND.name}"
        raise
    path = config_file or env.CONFIG.get()
    if option:
        return name, "named by --backend"
    if path and read_config_file(path):
        return name, f"named by {path}" if config_file else f"named by {path} ({env.CONFIG.name})"
    return name, f"named by {env.BACKEND.name}" if env.BACKEND.get() else "the default"
