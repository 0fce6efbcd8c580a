"""What tests between nodes share."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ep_a2a.compat.triton_distributed import contexts
from ep_a2a.env import INTERNODE_TRANSPORT
from ep_a2a.managers import base
from ep_a2a.testing import RankContext
from ep_a2a.topology.facts import RankFacts, TopologyReport
from tests.cases.op_cases import Case, built_op, make_inputs, run_step


def over(context: RankContext, transport: str, body: Callable[..., Any], *arguments: Any) -> Any:
    """A body whose tokens this transport carries between nodes, if the body leaves the choice open."""
    with mock.patch.dict(os.environ, {INTERNODE_TRANSPORT.name: transport}):
        return body(context, *arguments)


@contextlib.contextmanager
def on_hosts(hosts: str) -> Iterator[None]:
    """Layers and buffers find their ranks on these hosts, a letter each, none of which shares memory with another."""

    def report(*_: object) -> TopologyReport:
        facts = tuple(RankFacts(f"host-{host}", host) for host in hosts)
        return TopologyReport(facts, tuple(tuple("" if a == b else "no such file" for b in hosts) for a in hosts))

    with mock.patch.object(base, "gather_report", report), mock.patch.object(contexts, "gather_report", report):
        yield


def begun_by_some(context: RankContext, case: Case) -> None:
    """A dispatch that only one rank has begun is lost with a reset."""
    with built_op(context, case) as op:
        run_step(case, op, 0, context.device)
        if context.rank == 0:
            mine = make_inputs(case, 1, context.rank)
            op.dispatch_send(mine.tokens, mine.weights, None, mine.ids)
        op.reset()
        run_step(case, op, 2, context.device)
