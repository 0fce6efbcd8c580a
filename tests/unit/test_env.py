"""Environment variables: default, parsing, and errors that name the variable and its value."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from ep_a2a import env
from ep_a2a.commands.messages import set_up_logging
from ep_a2a.compat import deep_ep_sizes
from ep_a2a.config.file import choose_backend
from ep_a2a.errors import EnvironmentVariableError, EpA2AError
from ep_a2a.managers.registry import check_backend_name
from ep_a2a.memory.transport_choice import choose_transport
from tests.cases.tables import read_table

DEFAULTS = read_table("variables")["defaults"]
NAMES = tuple(DEFAULTS)


@pytest.fixture(autouse=True)
def _names_are_not_checked_yet(monkeypatch):
    monkeypatch.setattr(env, "_names_are_checked", False)


def test_all_variables_are_listed():
    assert tuple(variable.name for variable in env.VARIABLES) == NAMES
    declared = [value for value in vars(env).values() if isinstance(value, env.Variable)]
    assert declared == list(env.VARIABLES)
    for variable in env.VARIABLES:
        assert variable.name.startswith("EP_A2A_")
        assert variable.expects
        assert variable.doc.endswith(".")


@pytest.mark.parametrize("variable", env.VARIABLES, ids=NAMES)
def test_defaults(variable, monkeypatch):
    default = DEFAULTS[variable.name]
    assert variable.get() == variable.default == default
    # a launcher's empty line means nothing
    monkeypatch.setenv(variable.name, "")
    assert variable.get() == default


@pytest.mark.parametrize(("name", "text", "value"), read_table("variables")["values"])
def test_values(name, text, value, monkeypatch):
    monkeypatch.setenv(name, text)
    (variable,) = (each for each in env.VARIABLES if each.name == name)
    assert variable.get() == value
    assert type(variable.get()) is type(value)


BAD_DEVICES = ("^", ",", "mlx5_0,", "mlx5_0,,mlx5_1", "^^mlx5_0", "^mlx5_0,^mlx5_1", "mlx5_0;mlx5_1", "=mlx5_0", "a b")
BAD = [
    *((env.TIMEOUT_SECS, text) for text in ("soon", "0", "-1", "nan", "inf", "30s", "1,5", " ")),
    *((env.RDMA_DEVICES, text) for text in (" ", *BAD_DEVICES)),
    (env.ANY_VLLM, "yes"),
]


@pytest.mark.parametrize(("variable", "text"), BAD)
def test_an_error_names_variable_and_value(variable, text, monkeypatch):
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(EnvironmentVariableError) as caught:
        variable.get()
    assert caught.value.expected == f"{variable.name} to be {variable.expects}"
    assert caught.value.got == repr(text)
    assert "docs/env.md" in caught.value.remedy


def test_variables_of_other_libraries_are_set_unless_they_are_set(monkeypatch):
    monkeypatch.setenv("OTHER_LIBRARY", "")
    assert env.set_unless_set("OTHER_LIBRARY", "first") == "first"
    assert env.set_unless_set("OTHER_LIBRARY", "second") == "first"
    assert env.other_variable("OTHER_LIBRARY") == "first"


@pytest.mark.parametrize("text", ["LOUD", "10x", "warn ing"])
def test_a_bad_log_level_names_variable_and_value(text, monkeypatch):
    """Where it is used: the levels are those that logging knows by then."""
    monkeypatch.setenv("EP_A2A_LOG_LEVEL", text)
    before = logging.getLogger("ep_a2a").level
    with pytest.raises(EnvironmentVariableError, match=r"EP_A2A_LOG_LEVEL to be one of .*WARNING.*; got") as caught:
        set_up_logging()
    assert caught.value.got == repr(text.upper())
    assert logging.getLogger("ep_a2a").level == before


# --- names that do not exist ---


def test_a_misspelt_variable_is_named_once(monkeypatch, caplog):
    monkeypatch.setenv("EP_A2A_TIMEOUT_SEC", "9")
    monkeypatch.setenv("EP_A2A_ZZZZZZZZ", "1")
    monkeypatch.setenv("EP_A2A_TEST_OF_THE_ENVIRONMENT", "1")
    monkeypatch.setenv("OTHER_EP_A2A_BACKEND", "1")
    with caplog.at_level(logging.WARNING):
        for variable in env.VARIABLES:
            variable.get()
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "EP_A2A_TIMEOUT_SEC is set and is no variable of ep_a2a: it does nothing. Did you mean 'EP_A2A_TIMEOUT_SECS'?",
        "EP_A2A_ZZZZZZZZ is set and is no variable of ep_a2a: it does nothing. See docs/env.md.",
    ]


def test_a_process_that_gets_its_environment_from_another_is_silent(monkeypatch, caplog):
    monkeypatch.setenv("EP_A2A_TIMEOUT_SEC", "9")
    with caplog.at_level(logging.WARNING):
        variables = env.all_variables()
        assert len(caplog.records) == 1
        monkeypatch.setattr(env, "_names_are_checked", False)
        env.take_over(variables)
        env.BACKEND.get()
    assert len(caplog.records) == 1


def test_known_names_are_no_typos(monkeypatch, caplog):
    for variable in env.VARIABLES:
        monkeypatch.setenv(variable.name, "")
    with caplog.at_level(logging.WARNING):
        env.BACKEND.get()
    assert not caplog.records


# --- garbage in any variable is an error where it is used ---

USES: dict[str, Callable[[], Any]] = {
    "EP_A2A_BACKEND": lambda: check_backend_name(choose_backend(None, None)),
    "EP_A2A_CONFIG": lambda: choose_backend(None, None),
    "EP_A2A_INTERNODE_TRANSPORT": lambda: choose_transport("auto", {}),
    "EP_A2A_LOG_LEVEL": set_up_logging,
    "EP_A2A_DEEPEP_EDITION": deep_ep_sizes.known_ranks,
}
"""Those that are not refused when they are read."""


@pytest.mark.parametrize("variable", env.VARIABLES, ids=NAMES)
def test_garbage_is_an_error_that_shows_it(variable, monkeypatch):
    garbage = "no/such ; thing"
    monkeypatch.setenv(variable.name, garbage)
    with pytest.raises(EpA2AError) as caught:
        USES.get(variable.name, variable.get)()
    assert garbage in str(caught.value).replace("NO/SUCH ; THING", garbage)
    assert caught.value.remedy
