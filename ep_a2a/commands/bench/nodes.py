"""Runs the op across virtual nodes, by kernel and transport, and counts the rows that cross between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ep_a2a.commands.bench.native import OpContender, OpSession
from ep_a2a.config import EpDispatchCombineKernelType as KernelType
from ep_a2a.errors import CheckFailedError
from ep_a2a.memory.nvshmem import library_folder
from ep_a2a.ops.factory import OpFactory
from ep_a2a.topology import classify, gather_report

if TYPE_CHECKING:
    import torch

    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.testing.worker import RankContext


class FlatSession(OpSession):
    """The op where every rank writes to every other, as inside a node: a token crosses once per rank."""

    def __init__(self, workload: Workload, context: RankContext, contender: OpContender) -> None:
        super().__init__(workload, context, contender)
        self.details["rows_between_nodes"] = workload.rows_between_nodes[1]


class RingsSession(OpSession):
    """The op on rings in memory that all ranks address: a token crosses once to each other node."""

    def check(self) -> None:
        """Checks a round trip, and that one row crossed per token and other node. Collective."""
        from ep_a2a.ops.rings import rows_from_other_nodes

        super().check()
        own = rows_from_other_nodes(self.op, self._workload.num_tokens)
        crossed = sum(self._arena.rendezvous.exchange("rows that crossed", own))
        once, flat = self._workload.rows_between_nodes
        if crossed != once:
            raise CheckFailedError(f"{once} rows to cross between nodes, one per token and node", str(crossed))
        self.details |= {"rows_between_nodes": crossed, "rows_between_nodes_flat": flat}


class FactorySession(OpSession):
    """The op as a manager makes it."""

    def _make_op(self, config: EpDispatchCombineConfig, context: RankContext) -> EpDispatchCombineOp:
        self._factory = OpFactory(self._arena)
        topology = classify(gather_report(context.group, context.device), self._workload.gpus_per_node)
        try:
            return self._factory.make(config, topology, None)
        except Exception:
            self._factory.close()
            raise

    def close(self) -> None:
        """Closes the op and gives back its memory and its transport between nodes."""
        super().close()
        self._factory.close()


class StagedSession(FactorySession):
    """The op over torch.distributed: M lines to each node whatever the routing, then a hop inside the node."""

    def __init__(self, workload: Workload, context: RankContext, contender: OpContender) -> None:
        super().__init__(workload, context, contender)
        lines = workload.world_size * (workload.num_nodes - 1) * workload.max_num_tokens
        payload = workload.rows_between_nodes[0]
        self.details |= {"rows_between_nodes": payload, "padding_between_nodes": lines - payload}


class PutRingsSession(RingsSession, FactorySession):
    """The op on rings whose chunks NVSHMEM puts to other nodes; on CPU, copies stand for puts."""


@dataclass
class NodesContender(OpContender):
    """The op with a kernel or a transport that the policy may not choose for this workload."""

    def unavailable(self, workload: Workload, device: torch.device) -> str | None:
        """Returns why the op refuses the workload, that it has one node, or that NVSHMEM is missing on a GPU."""
        if workload.num_nodes == 1:
            return "all ranks are on one node"
        reason = super().unavailable(workload, device)
        if reason is None and self.session is PutRingsSession and device.type == "cuda" and library_folder() is None:
            reason = "no package nvidia-nvshmem"
        return reason


CONTENDERS = tuple(
    NodesContender(name, session, kernel_type=kernel_type, internode_transport=transport)
    for name, session, kernel_type, transport in (
        ("ep_a2a_v1", RingsSession, KernelType.InterNodeV1, "peer_memory"),
        ("ep_a2a_v1_ll", RingsSession, KernelType.InterNodeV1LL, "peer_memory"),
        ("ep_a2a_flat", FlatSession, KernelType.InterNode, "peer_memory"),
        ("ep_a2a_staged", StagedSession, KernelType.InterNodeV1, "torch.distributed"),
        ("ep_a2a_nvshmem", PutRingsSession, KernelType.InterNodeV1, "nvshmem"),
        ("ep_a2a_nvshmem_ll", PutRingsSession, KernelType.InterNodeV1LL, "nvshmem"),
    )
)
"""InterNodeV1 has rings of a few chunks; rings of InterNodeV1LL hold a whole step."""
