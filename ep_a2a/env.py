"""Environment variables of this package, with type, default and meaning; no other module reads the environment."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ep_a2a.errors import EnvironmentVariableError, did_you_mean, shown

T = TypeVar("T")
logger = logging.getLogger(__name__)

PREFIX = "EP_A2A_"
TESTS_PREFIX = "EP_A2A_TEST_"
"""Variables of the test suite, which the package does not read."""


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: the variable's name.
        default: the value when it is unset or empty.
        parse: turns the text into the value; raises ValueError for text it cannot use.
        expects: the values that `parse` accepts, in words, for error messages and docs/env.md.
        doc: its meaning.
    """

    name: str
    default: T
    parse: Callable[[str], T]
    expects: str
    doc: str

    def get(self) -> T:
        """Returns the current value. The first call in a process warns of set variables that do not exist.

        Raises:
            EnvironmentVariableError: the text cannot be parsed.
        """
        warn_of_unknown()
        text = os.environ.get(self.name, "")
        return self.value_of(text, self.name) if text else self.default

    def value_of(self, text: str, name: str) -> T:
        """Returns the value of a text that the variable `name` has; raises as `get`."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise EnvironmentVariableError(f"{name} to be {self.expects}", shown(text)) from error


MAX_TIMEOUT_SECS = 1e9
"""Three decades; in nanoseconds it still fits the 64 bits that kernels count with."""


def _checked(kind: Callable[[str], T], fits: Callable[[T], object]) -> Callable[[str], T]:
    """Returns a parser that refuses values which do not fit."""

    def parse(text: str) -> T:
        value = kind(text)
        if not fits(value):
            raise ValueError(text)
        return value

    return parse


_timeout_secs = _checked(float, lambda secs: 0 < secs <= MAX_TIMEOUT_SECS)


_devices = _checked(
    lambda text: re.sub(r"\s*([,^])\s*", r"\1", text.strip()), re.compile(r"\^?[\w.-]+(,[\w.-]+)*").fullmatch
)


BACKEND = Variable(
    "EP_A2A_BACKEND",
    "",
    str,
    "a backend name",
    "Backend of EP groups when neither the call nor the config names one; in ATOM, the switch (docs/atom.md).",
)
CONFIG = Variable(
    "EP_A2A_CONFIG", "", str, "a path", "Config file (configs/*.toml) read by init_dist_env when the call names none."
)
TIMEOUT_SECS = Variable(
    "EP_A2A_TIMEOUT_SECS",
    30.0,
    _timeout_secs,
    "a positive number of seconds",
    "How long a kernel waits for other ranks when the op's config does not say (timeout_secs); in vLLM, after warm-up.",
)
FIRST_TIMEOUT_SECS = Variable(
    "EP_A2A_FIRST_TIMEOUT_SECS",
    300.0,
    _timeout_secs,
    "a positive number of seconds",
    "The same for an op's first step, in which other ranks may still be loading (first_timeout_secs), if it is longer.",
)
ANY_VLLM = Variable(
    "EP_A2A_ANY_VLLM",
    False,
    lambda text: _checked(str, ("0", "1").__contains__)(text) == "1",
    "0 or 1",
    "1 = use a vLLM that lacks names which ep_a2a uses. MoE layers may then return wrong results, or wait for ever.",
)
INTERNODE_TRANSPORT = Variable(
    "EP_A2A_INTERNODE_TRANSPORT",
    "auto",
    str,
    "auto, or a transport's name",
    "What carries tokens between nodes: torch.distributed, nvshmem, or peer_memory for virtual nodes of one host.",
)
RDMA_DEVICES = Variable(
    "EP_A2A_RDMA_DEVICES",
    "",
    _devices,
    "RDMA devices with commas between, behind ^ those not to use",
    "Devices that carry tokens between nodes, for NCCL and NVSHMEM; NCCL_IB_HCA and NVSHMEM_HCA_LIST take precedence.",
)
DEEPEP_EDITION = Variable(
    "EP_A2A_DEEPEP_EDITION",
    2026,
    _checked(int, lambda year: year in (2025, 2026)),
    "2025 or 2026",
    "Edition of DeepEP whose size hints and configs compat's Buffer and Config give.",
)
LOG_LEVEL = Variable(
    "EP_A2A_LOG_LEVEL",
    "WARNING",
    str.upper,
    "a logging level name",
    "Level of the `ep_a2a` logger in the CLI. With INFO every process writes that kernels compile.",
)

VARIABLES: tuple[Variable[Any], ...] = tuple(each for each in tuple(globals().values()) if isinstance(each, Variable))
"""All variables of this module, in its order."""


def check_values() -> None:
    """Reads all variables of this package.

    Raises:
        EnvironmentVariableError: the text of one cannot be parsed.
    """
    for variable in VARIABLES:
        variable.get()


def unknown_variables() -> dict[str, str]:
    """Returns the set EP_A2A_* variables that the package does not read; the values are hints, or ""."""
    known = [variable.name for variable in VARIABLES]
    names = (name for name in sorted(os.environ) if name.startswith(PREFIX) and not name.startswith(TESTS_PREFIX))
    return {name: did_you_mean(name, known) for name in names if name not in known}


_names_are_checked = False


def warn_of_unknown() -> None:
    """Warns of each variable in `unknown_variables`; only the first call in a process does."""
    global _names_are_checked
    if _names_are_checked:
        return
    _names_are_checked = True
    for name, hint in unknown_variables().items():
        logger.warning("%s is set and is no variable of ep_a2a: it does nothing. %s", name, hint or "See docs/env.md.")


FOREIGN_PREFIXES = ("NCCL_", "NVSHMEM_", "GLOO_", "CUDA_", "TRITON_", "TORCH_", "VLLM_PLUGINS", "VLLM_EXECUTE_")


def variables_for_doctor() -> dict[str, str]:
    """Returns the set variables of this package and of the libraries that it uses."""
    prefixes = (PREFIX, *FOREIGN_PREFIXES)
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def set_with_prefix(prefix: str) -> tuple[str, ...]:
    """Returns the names of the set variables that begin with `prefix`, in alphabetical order."""
    return tuple(sorted(name for name, value in os.environ.items() if name.startswith(prefix) and value))


def other_variable(name: str) -> str:
    """Returns a variable of another program (CC, torchrun's LOCAL_RANK), "" where it is unset."""
    return os.environ.get(name, "")


SAFE_PATH = "PYTHONSAFEPATH"


def set_unless_set(name: str, value: str) -> str:
    """Sets another library's variable unless it has a value; returns its value."""
    if not os.environ.get(name):
        os.environ[name] = value
    return os.environ[name]


def set_from(name: str, variable: Variable[Any]) -> bool:
    """Gives a variable of this package the value of another library's, unless it has one; returns whether it has that.

    Raises:
        EnvironmentVariableError: the text cannot be parsed.
    """
    text = os.environ.get(name, "")
    if not text:
        return False
    variable.value_of(text, name)
    return set_unless_set(variable.name, text) == text


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Lets Python processes that start meanwhile import nothing from the current folder (PYTHONSAFEPATH).

    `multiprocessing` starts its helpers by `python -c`, which else searches the current folder before the standard
    library.
    """
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def all_variables() -> dict[str, str]:
    """The environment now, to be handed to another process. Warns of unknown variables, which that one does not."""
    warn_of_unknown()
    return dict(os.environ)


def take_over(variables: dict[str, str]) -> None:
    """Replaces this process's environment by that of another process, the result of its `all_variables`."""
    global _names_are_checked
    _names_are_checked = True
    os.environ.clear()
    os.environ.update(variables)
