"""No unit test meets a choice that the user of this machine has made."""

import pytest

CHOICES = (
    "EP_A2A_ANY_VLLM",
    "EP_A2A_BACKEND",
    "EP_A2A_CONFIG",
    "EP_A2A_DEEPEP_EDITION",
    "EP_A2A_FIRST_TIMEOUT_SECS",
    "EP_A2A_INTERNODE_TRANSPORT",
    "EP_A2A_TIMEOUT_SECS",
    "EP_A2A_TUNING_DIR",
)


@pytest.fixture(autouse=True)
def _no_choices_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)
