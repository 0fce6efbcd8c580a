"""Errors name the option that sets the field they are about."""

import pickle

import pytest

from ep_a2a.cli import app
from ep_a2a.cli.command import options_of
from ep_a2a.commands.options import OPTIONS_OF_FIELDS, option_of_field
from ep_a2a.config import parse_enum
from ep_a2a.config.enums import Layout
from ep_a2a.errors import ConfigError, EpA2AError


@pytest.mark.parametrize(
    ("command", "field", "option"),
    [
        ("bench", "max_num_tokens", "--max-tokens"),
        ("bench", "num_tokens", "--tokens"),
        ("demo", "max_num_tokens_per_dp_rank", "--tokens"),
        ("plan", "num_credits", "--credits"),
        ("plan", "chunk_tokens", "--chunk-tokens"),
        ("doctor", "ranks_per_node", "--ranks-per-node"),
        ("demo", "scale_dim", "scale_dim"),
        ("backends", "name", "name"),
    ],
)
def test_the_option_of_a_field(command: str, field: str, option: str) -> None:
    assert option_of_field(options_of(command), field) == option


def test_every_field_in_the_table_has_an_option_of_some_command() -> None:
    known = {each.name for command in ("demo", "bench", "plan") for each in options_of(command)}
    assert {name for names in OPTIONS_OF_FIELDS.values() for name in names} <= known


def test_an_error_begins_with_its_field_also_under_another_name() -> None:
    error = ConfigError("to be 1 or more", "0", field="hidden_dim")
    assert error.expected == "hidden_dim to be 1 or more"
    assert str(error).startswith("expected hidden_dim to be 1 or more; got 0. ")
    error.field = "--hidden"
    again = pickle.loads(pickle.dumps(error))
    assert (again.field, again.expected, str(again)) == ("--hidden", "--hidden to be 1 or more", str(error))


def test_a_name_that_is_not_known_carries_the_field() -> None:
    with pytest.raises(EpA2AError) as caught:
        parse_enum(Layout, "round", "layout")
    assert caught.value.field == "layout"


@pytest.mark.parametrize("arguments", [["plan", "--hidden", "3"], ["bench", "--device", "cpu", "--tokens", "x"]])
def test_the_remedy_is_about_the_option_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app.run(arguments)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"Correct the option; `ep-a2a {arguments[0]} --help` says what it takes." in said
