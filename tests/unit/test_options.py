"""Errors name the option that sets the field they are about."""

import pickle

import pytest
import typer

from ep_a2a.cli import app
from ep_a2a.commands.options import OPTIONS_OF_FIELDS
from ep_a2a.config import parse_enum
from ep_a2a.config.enums import Layout
from ep_a2a.errors import ConfigError, EpA2AError


@pytest.mark.parametrize(
    ("command", "field", "named"),
    [
        ("bench", "max_tokens", "--tokens"),
        ("bench", "num_tokens", "--tokens"),
        ("demo", "max_num_tokens_per_dp_rank", "--tokens"),
        ("plan", "gpu_per_node", "--gpus-per-node"),
        ("doctor", "ranks_per_node", "--ranks-per-node"),
        ("demo", "scale_dim", "scale_dim"),
        ("backends", "name", "name"),
        ("plan", None, None),
    ],
)
def test_an_error_names_the_option_of_its_field(command: str, field: str | None, named: str | None) -> None:
    def fail(**_: object) -> None:
        raise ConfigError("to be 1 or more", "0", field=field)

    found = typer.main.get_command(app.app).commands[command]  # type: ignore[attr-defined]
    found.callback = fail
    context = typer.Context(found, parent=typer.Context(found))
    with pytest.raises(ConfigError) as caught:
        found.invoke(context)
    assert caught.value.field == named


def test_every_field_in_the_table_has_an_option_of_some_command() -> None:
    commands = typer.main.get_command(app.app).commands.values()  # type: ignore[attr-defined]
    known = {each.name for command in commands for each in command.params}
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


@pytest.mark.parametrize("arguments", [["plan", "--hidden", "3"], ["demo", "--device", "cpu", "--hidden", "12"]])
def test_the_remedy_is_about_the_option_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app.run(arguments)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"Correct the option; `ep-a2a {arguments[0]} --help` says what it takes." in said
