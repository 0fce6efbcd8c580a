"""No unit test meets a choice that the user of this machine has made; a group of one rank for those that want it."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from ep_a2a import env


@pytest.fixture(autouse=True)
def _no_choices_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup | None]:
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
