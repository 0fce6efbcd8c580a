"""What tests of ops over torch.distributed share: an arena of virtual nodes, and bodies of op tests on one."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from ep_a2a.compat.triton_distributed import contexts
from ep_a2a.env import INTERNODE_TRANSPORT
from ep_a2a.managers import base
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.node_memory import NodeArena
from ep_a2a.memory.node_transport import NodeAllToAll
from ep_a2a.testing import RankContext
from ep_a2a.topology.facts import RankFacts, TopologyReport
from tests.cases import call_orders, op_cases, op_special, op_steps
from tests.cases.op_cases import Case

TIMEOUT_SECS = 60.0


def over_torch_distributed(case: Case) -> Case:
    """A case of several nodes, with the transport by name."""
    return replace(case, options=case.options | {"internode_transport": "torch.distributed"})


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


def node_arena(context: RankContext, num_nodes: int) -> NodeArena:
    """Memory of virtual nodes into which the context's ranks are cut."""
    grid = NodeGrid(num_nodes, context.world_size // num_nodes, context.rank)
    return NodeArena(context.group, grid, context.device, NodeAllToAll(context.group, grid, TIMEOUT_SECS))


@contextlib.contextmanager
def arenas_from(make: Callable[..., NodeArena]) -> Iterator[None]:
    """Bodies of op tests get their memory from a function."""
    with contextlib.ExitStack() as stack:
        for module in (call_orders, op_cases, op_special, op_steps):
            stack.enter_context(mock.patch.object(module, "Arena", make))
        yield


def staged(context: RankContext, body: Callable[..., Any], case: Case, *more: Any) -> Any:
    """A body of an op test with an op over torch.distributed."""
    with arenas_from(lambda *_: node_arena(context, case.num_nodes)):
        return body(context, over_torch_distributed(case), *more)


def begun_by_some(context: RankContext, case: Case) -> None:
    """A dispatch that only one rank has begun is lost with a reset."""
    with op_cases.Arena(context.group, context.device) as arena:
        op = op_cases.make_op(context, case, arena)
        op_cases.run_step(case, op, 0, context.device)
        if context.rank == 0:
            mine = op_cases.make_inputs(case, 1, context.rank)
            op.dispatch_send(mine.tokens, mine.weights, None, mine.ids)
        op.reset()
        op_cases.run_step(case, op, 2, context.device)
