"""Runs the op across virtual nodes, by kernel and transport, and counts the rows that cross between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ep_a2a.commands.bench.native import OpContender, OpSession
from ep_a2a.config import EpDispatchCombineKernelType
from ep_a2a.errors import CheckFailedError
from ep_a2a.memory.nvshmem import library_folder
from ep_a2a.ops.factory import OpFactory
from ep_a2a.topology import classify, gather_report

if TYPE_CHECKING:
    import torch

    from ep_a2a.commands.bench.contender import BenchContext, Session
    from ep_a2a.commands.bench.workload import Workload
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.op import EpDispatchCombineOp


class NodesContender(OpContender):
    """The op with a kernel or a transport that the policy may not choose for this workload."""

    def unavailable(self, workload: Workload, device: torch.device) -> str | None:
        """Returns why the op refuses the workload, or that it has one node."""
        return "all ranks are on one node" if workload.num_nodes == 1 else super().unavailable(workload, device)


class RingsContender(NodesContender):
    """An op whose tokens cross to each other node once, through rings in memory that all ranks address."""

    internode_transport = "peer_memory"

    def prepare(self, workload: Workload, context: BenchContext) -> Session:
        """Builds the op. Collective."""
        return RingsSession(workload, context, self)


class InterNodeV1Contender(RingsContender):
    """Rings of a few chunks."""

    name: ClassVar[str] = "ep_a2a_v1"
    kernel_type = EpDispatchCombineKernelType.InterNodeV1


class InterNodeV1LLContender(RingsContender):
    """Rings that hold a whole step."""

    name: ClassVar[str] = "ep_a2a_v1_ll"
    kernel_type = EpDispatchCombineKernelType.InterNodeV1LL


class FlatContender(NodesContender):
    """Every rank writes to every other, as inside a node: a token crosses once per rank."""

    name: ClassVar[str] = "ep_a2a_flat"
    kernel_type = EpDispatchCombineKernelType.InterNode
    internode_transport = "peer_memory"

    def prepare(self, workload: Workload, context: BenchContext) -> Session:
        """Builds the op. Collective."""
        session = super().prepare(workload, context)
        session.details["rows_between_nodes"] = workload.rows_between_nodes[1]
        return session


class StagedContender(NodesContender):
    """A hop over torch.distributed that sends M lines to each node, whatever the routing, and one inside the node."""

    name: ClassVar[str] = "ep_a2a_staged"
    kernel_type = EpDispatchCombineKernelType.InterNodeV1
    internode_transport = "torch.distributed"

    def prepare(self, workload: Workload, context: BenchContext) -> Session:
        """Builds the op. Collective."""
        return StagedSession(workload, context, self)


class NvshmemContender(NodesContender):
    """Rings of a few chunks, which kernels put to other nodes by NVSHMEM."""

    name: ClassVar[str] = "ep_a2a_nvshmem"
    kernel_type = EpDispatchCombineKernelType.InterNodeV1
    internode_transport = "nvshmem"

    def prepare(self, workload: Workload, context: BenchContext) -> Session:
        """Builds the op. Collective."""
        return PutRingsSession(workload, context, self)

    def unavailable(self, workload: Workload, device: torch.device) -> str | None:
        """Returns why the op refuses the workload, or that NVSHMEM is missing. On CPU copies stand for puts."""
        reason = super().unavailable(workload, device)
        if reason is None and device.type == "cuda" and library_folder() is None:
            reason = "no package nvidia-nvshmem"
        return reason


class NvshmemLLContender(NvshmemContender):
    """The same with rings that hold a whole step."""

    name: ClassVar[str] = "ep_a2a_nvshmem_ll"
    kernel_type = EpDispatchCombineKernelType.InterNodeV1LL


class MadeByFactory(OpSession):
    """An op as a manager makes it."""

    def _make_op(self, config: EpDispatchCombineConfig, context: BenchContext) -> EpDispatchCombineOp:
        self._factory = OpFactory(self._arena)
        topology = classify(gather_report(context.group, context.device), self._workload.gpus_per_node)
        try:
            return self._factory.make(config, topology, None)
        except Exception:
            self._factory.close()
            raise

    def close(self) -> None:
        """Closes the op and gives back its memory and its transport."""
        super().close()
        self._factory.close()


class StagedSession(MadeByFactory):
    """The staged op and how many rows its lines pad."""

    def __init__(self, workload: Workload, context: BenchContext, contender: OpContender) -> None:
        super().__init__(workload, context, contender)
        lines = workload.world_size * (workload.num_nodes - 1) * workload.max_num_tokens
        payload = workload.rows_between_nodes[0]
        self.details |= {"rows_between_nodes": payload, "padding_between_nodes": lines - payload}


class RingsSession(OpSession):
    """The op on rings."""

    def check(self) -> None:
        """A round trip, and that as many rows crossed as there are tokens times distinct other nodes. Collective."""
        from ep_a2a.ops.open_step import rows_from_other_nodes

        super().check()
        own = rows_from_other_nodes(self.op, self._workload.num_tokens)
        crossed = sum(self._arena.rendezvous.exchange("rows that crossed", own))
        once, flat = self._workload.rows_between_nodes
        if crossed != once:
            raise CheckFailedError(f"{once} rows to cross between nodes, one per token and node", str(crossed))
        self.details |= {"rows_between_nodes": crossed, "rows_between_nodes_flat": flat}


class PutRingsSession(RingsSession, MadeByFactory):
    """The op on rings whose chunks are put."""
