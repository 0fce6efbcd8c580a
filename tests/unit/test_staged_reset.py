"""What reset does to the connections between nodes, with a transport that is made up."""

from types import SimpleNamespace
from typing import Any

import pytest

from ep_a2a.ops.staged import StagedEngine


def kernels(*, is_well_here: bool, is_well_elsewhere: bool, interpreted: bool = False) -> tuple[Any, list[str]]:
    """Kernels of a node on GPUs, connected, and the list of what is asked of the transport."""
    done: list[str] = []
    engine: Any = StagedEngine.__new__(StagedEngine)
    engine._between = SimpleNamespace(
        is_open=is_well_here, renew=lambda: done.append("renew"), exchange=lambda *_: done.append("exchange")
    )
    engine._rendezvous = SimpleNamespace(exchange=lambda _, own: [own, is_well_elsewhere])
    engine._memory = SimpleNamespace(view=lambda *_: None)
    engine.rings = SimpleNamespace(num_nodes=2, head_words=1)
    engine.kernels = SimpleNamespace(interpreted=interpreted)
    engine._running, engine._is_connected = None, True
    return engine, done


@pytest.mark.parametrize(("here", "elsewhere"), [(False, True), (True, False), (False, False)])
def test_reset_connects_anew_on_all_ranks_where_one_has_failed(here: bool, elsewhere: bool) -> None:
    """A later call, which is local, must not make an exchange: the other ranks would not take part."""
    engine, done = kernels(is_well_here=here, is_well_elsewhere=elsewhere)
    engine.quiet()
    assert done == ["renew", "exchange"]
    engine._connect()
    assert done == ["renew", "exchange"]


def test_reset_keeps_connections_that_are_well() -> None:
    engine, done = kernels(is_well_here=True, is_well_elsewhere=True)
    engine.quiet()
    assert not done


def test_on_cpu_the_first_exchange_connects() -> None:
    engine, done = kernels(is_well_here=False, is_well_elsewhere=True, interpreted=True)
    engine.quiet()
    assert done == ["renew"]
