"""What every backend's manager has: vLLM's and AITER's all-to-all manager interface in one class."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.distributed as dist

from ep_a2a.errors import ClosedError, StateError, UnsupportedError
from ep_a2a.managers.cache import Cache
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.topology import Topology, TopologyReport, classify, gather_report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from ep_a2a.managers.external.libraries import Library

DispatchedTokens = (
    tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]
)
DispatchedLogits = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]

OFFERED_BY = {
    "get_handle": ("ep_a2a", "naive", "allgather_reducescatter"),
    "dispatch": ("naive", "allgather_reducescatter"),
    "dispatch_router_logits": ("naive", "allgather_reducescatter"),
    "combine": ("naive", "allgather_reducescatter"),
    "set_num_sms": ("ep_a2a",),
}
"""Backends that need no other library and offer what not all offer, for errors; a test compares it with the classes."""


class All2AllManagerBase:
    """Base of all managers. Creating one allocates no device memory and communicates nothing.

    Methods that a backend does not offer raise UnsupportedError, naming a backend that does. `dispatch` and
    `combine` here work on hidden states; the ops that `get_handle` returns have their own.

    Args:
        cpu_group: the expert-parallel group, able to move CPU tensors (gloo); this process is a member.
        tcp_store_group: kept for vLLM, whose elastic groups pass one.

    Attributes:
        backend: its name.
        capabilities: what it can do.
        library: another project's package that it needs, or None.
        rank, world_size: this process in the group, and the group's size.
        device_group: None, or a process group of the same ranks that moves CUDA tensors (NCCL), to be set by its
            owner before first use; managers that need one make their own otherwise.
        dp_group, tp_group: None, or the coordinators of the engine's data- and tensor-parallel groups, for readers
            of vLLM's attributes. All ranks of cpu_group exchange tokens whatever these are.
        handle_cache: ops by handle kwargs.
    """

    backend: ClassVar[str] = ""
    capabilities: ClassVar[Capabilities] = Capabilities(has_handles=False)
    library: ClassVar[Library | None] = None
    support_fault_tolerance: bool = False

    def __init__(self, cpu_group: dist.ProcessGroup, tcp_store_group: Any = None) -> None:
        self.cpu_group = cpu_group
        self.tcp_store_group = tcp_store_group
        self.rank = dist.get_rank(cpu_group)
        self.world_size = dist.get_world_size(cpu_group)
        self.device_group: dist.ProcessGroup | None = None
        self.dp_group: Any = None
        self.tp_group: Any = None
        self.handle_cache = Cache()
        self._device: torch.device | None = None
        self._device_in_use = False
        self._report: TopologyReport | None = None
        self._lock = threading.Lock()
        self._closed = self._closes_alone = False

    @property
    def dp_rank(self) -> int:
        """This rank in dp_group; without one every rank brings its own tokens, so it is `rank`."""
        return self.rank if self.dp_group is None else int(self.dp_group.rank_in_group)

    @property
    def dp_world_size(self) -> int:
        """Ranks of dp_group, or `world_size` without one."""
        return self.world_size if self.dp_group is None else int(self.dp_group.world_size)

    @property
    def device(self) -> torch.device:
        """Where ops put their memory: the current CUDA device, or CPU without one; settable before the first op.

        Raises:
            StateError: on setting it after an op has been made.
        """
        if self._device is None:
            self._device = _with_index(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return self._device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        if self._device_in_use:
            raise StateError("device to be set before the first op", "an op exists", "Create a new manager.")
        self._device = _with_index(torch.device(device))

    def topology(self, gpu_per_node: int | None = None) -> Topology:
        """Nodes of the group. The first call is collective; later ones, with any `gpu_per_node`, are local.

        Args:
            gpu_per_node: None goes by the facts; a number cuts virtual nodes of that many ranks.

        Raises:
            ConfigError: gpu_per_node does not fit the real nodes.
        """
        with self._lock:
            if self._report is None:
                self._report = gather_report(self.cpu_group, self.device)
        return classify(self._report, gpu_per_node)

    @property
    def internode(self) -> bool:
        """Whether the group spans several nodes. The first reading is collective: read it on every rank."""
        return self.topology().internode

    def explain(self, gpu_per_node: int | None = None, max_num_tokens: int | None = None) -> dict[str, str]:
        """What is picked and why: backend, kernel, kernel_reason, device, topology. Collective like `topology`.

        Args:
            gpu_per_node: as of `topology`.
            max_num_tokens: the op's `max_num_tokens_per_dp_rank`, by which some backends pick a kernel between nodes;
                None names all that there can be.
        """
        topology = self.topology(gpu_per_node)
        kernel, kernel_reason = self.kernel_for(topology.num_nodes, max_num_tokens)
        found = topology.reason
        if topology.shared_memory_problem is not None:
            found = f"{found}; {topology.shared_memory_problem}"
        return {
            "backend": self.backend,
            "kernel": kernel,
            "kernel_reason": kernel_reason,
            "device": str(self.device),
            "topology": found,
        }

    @classmethod
    def kernel_for(cls, num_nodes: int, max_num_tokens: int | None = None) -> tuple[str, str]:
        """Name of what moves the tokens, and why. Local.

        Args:
            num_nodes: nodes of the group.
            max_num_tokens: as of `explain`.
        """
        raise UnsupportedError(
            "a backend that says what moves its tokens", f"{cls.backend!r}, which does not", "Define kernel_for."
        )

    def get_handle(self, kwargs: Mapping[str, Any], index: int = 0) -> Any:
        """The op for these handle kwargs (see config_from_handle_kwargs). Collective when it does not exist yet.

        The manager keeps it weakly: hold on to it on every rank for as long as any rank uses it.

        Args:
            kwargs: vLLM's and AITER's handle kwargs; all but rank and num_local_experts equal on all ranks.
            index: ops whose steps overlap (micro-batches) need different indices.
        """
        raise self._unsupported("get_handle")

    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
    ) -> DispatchedLogits:
        """Every rank's hidden states [sum T_r, H] and router logits [sum T_r, E], in rank order.

        Args:
            hidden_states, router_logits: this rank's T_r rows.
            is_sequence_parallel: without effect: all ranks of the group exchange in either case.
            extra_tensors: further tensors of T_r rows; gathered likewise and returned as a list at the end.
        """
        raise self._unsupported("dispatch_router_logits")

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor | bool | None = None,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
    ) -> DispatchedTokens | DispatchedLogits:
        """Every rank's hidden states [sum T_r, H], topk_weights and topk_ids [sum T_r, K], in rank order.

        Both engines' forms are taken. vLLM passes three tensors. AITER passes (hidden_states, router_logits,
        is_sequence_parallel): where topk_ids is left out, or a bool stands in its place, the second tensor is router
        logits and the result is that of `dispatch_router_logits`.

        Args:
            hidden_states, topk_weights, topk_ids: this rank's T_r rows; T_r may be 0.
            is_sequence_parallel: without effect: all ranks of the group exchange in either case.
            extra_tensors: further tensors of T_r rows; gathered likewise and returned as a list at the end.
        """
        if isinstance(topk_ids, torch.Tensor):
            return self._dispatch_topk(hidden_states, topk_weights, topk_ids, extra_tensors)
        return self.dispatch_router_logits(
            hidden_states, topk_weights, bool(topk_ids) or is_sequence_parallel, extra_tensors
        )

    def _dispatch_topk(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        extra_tensors: Sequence[torch.Tensor] | None,
    ) -> DispatchedTokens:
        raise self._unsupported("dispatch")

    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """This rank's rows [T_r, H] of the sum over ranks of hidden_states [sum T_r, H]."""
        raise self._unsupported("combine")

    def allocate_combine_input(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_sequence_parallel: bool = False,
    ) -> torch.Tensor | None:
        """Memory that experts may write combine's input to; None where the backend has no wish."""
        return None

    def combine_into_output(
        self, hidden_states: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """`combine` into `output` [T_r, H], which is returned."""
        output.copy_(self.combine(hidden_states, is_sequence_parallel))
        return output

    def query_active_mask(self) -> torch.Tensor:
        """vLLM's fault tolerance: which ranks are alive."""
        raise self._unsupported("query_active_mask")

    def query_fault(self) -> torch.Tensor:
        """vLLM's fault tolerance: whether a rank has failed."""
        raise self._unsupported("query_fault")

    def clean_buffers(self) -> None:
        """vLLM's fault tolerance: makes buffers usable after a fault."""
        raise self._unsupported("clean_buffers")

    def set_num_sms(self, num_sms: int) -> None:
        """Bounds the multiprocessors that communication occupies; 0 removes the bound."""
        raise self._unsupported("set_num_sms")

    def max_sms_used(self) -> int | None:
        """The most multiprocessors that communication occupies; None where that is not bounded."""
        return None

    def checkpoint_prepare(self) -> None:
        """vLLM's checkpointing of a process: lets go of what cannot be saved."""
        raise self._unsupported("checkpoint_prepare")

    def checkpoint_restore(self) -> None:
        """vLLM's checkpointing of a process: takes up what checkpoint_prepare let go of."""
        raise self._unsupported("checkpoint_restore")

    def stage_ep_size(self) -> None:
        """vLLM's elastic expert parallelism: prepares another group size."""
        raise self._unsupported("stage_ep_size")

    def commit_ep_size(self) -> None:
        """vLLM's elastic expert parallelism: changes to the prepared group size."""
        raise self._unsupported("commit_ep_size")

    def mask_remote_ranks(self) -> AbstractContextManager[None]:
        """vLLM's elastic expert parallelism: within the context only this rank takes part."""
        raise self._unsupported("mask_remote_ranks")

    def destroy(self, *, alone: bool = False) -> None:
        """Closes every live op and gives all memory back; a second call does nothing. To be called on every rank.

        Args:
            alone: waits for no other rank, as after an exception that may be this rank's only.
        """
        if self._closed:
            return
        self._closed = True
        self._closes_alone = alone
        for op in self.handle_cache.handles():
            op.close()
        self.handle_cache.clear()
        self._release()

    def close(self) -> None:
        """`destroy` by another name."""
        self.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.destroy(alone=kind is not None)

    def _release(self) -> None:
        """Gives back what a subclass owns besides ops; called once."""

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("an open manager", "a destroyed one", "Create a new one: create_manager(name, group).")

    def _unsupported(self, method: str) -> UnsupportedError:
        backends = OFFERED_BY.get(method, ())
        remedy = f"Use {' or '.join(backends)}." if backends else "No backend of this version has it."
        return UnsupportedError(f"a backend that has {method}", f"{self.backend!r}, which has not", remedy)


def _with_index(device: torch.device) -> torch.device:
    # Tensors always name their device's index, and devices are compared with theirs.
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device
