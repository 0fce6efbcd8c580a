"""No unit test meets a choice that the user of this machine has made."""

import pytest

from ep_a2a import env


@pytest.fixture(autouse=True)
def _no_choices_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
