"""Base class of all managers: vLLM's and AITER's all-to-all manager interface, and their handle cache."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import ClosedError, ConfigError, StateError, UnsupportedError
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.memory.device_groups import DeviceGroups
from ep_a2a.memory.guards import become_closed
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.ops.inputs import address_of
from ep_a2a.topology import Topology, TopologyReport, classify, gather_report

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.managers.external.library import Library

_CREATE = "Create a new one: create_manager(name, group)."

Tensor = torch.Tensor
DispatchedTokens = tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, list[Tensor]]
DispatchedLogits = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, list[Tensor]]


class Cache:
    """Handles by key, kept weakly, under a lock.

    A handle lives as long as a layer holds it; until then the same key finds it again. The lock is held while a handle
    is made, because making one is usually collective: threads that ask for the same key get the same handle. Threads
    that ask for *different* new handles must do so in the same order on every rank.
    """

    def __init__(self) -> None:
        self._handles: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
        self._lock = threading.RLock()

    def get_or_create(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The open handle made for this key, or `make()` where there is none.

        Args:
            key: for ops of a manager the config and the index, which separates micro-batches whose steps overlap.
            make: makes a handle, which must allow weak references and not be None.
        """
        with self._lock:
            handle = self._handles.pop(key, None)
            if getattr(handle, "closed", handle is None):
                handle = make()
            self._handles[key] = handle
            return handle

    def handles(self) -> list[Any]:
        """Every handle that is alive and open, in the order in which `get_or_create` last returned them."""
        with self._lock:
            return [handle for handle in self._handles.values() if not getattr(handle, "closed", False)]

    def clear(self) -> None:
        """Forgets all handles; those still held elsewhere stay usable but are not found again."""
        with self._lock:
            self._handles.clear()

    def __len__(self) -> int:
        with self._lock:
            return len(self._handles)


class All2AllManagerBase:
    """Base of all managers. Creating one allocates no device memory and communicates nothing.

    A method that a backend does not offer raises UnsupportedError, which names the backends that do. `dispatch` and
    `combine` here work on hidden states; the ops that `get_handle` returns have their own.

    Args:
        cpu_group: the expert-parallel group, able to move CPU tensors (gloo); this process is a member.
        tcp_store_group: kept for vLLM, whose elastic groups pass one.

    Attributes:
        backend: the backend's registered name.
        capabilities: abilities and limits of the backend.
        library: the other project's package that the backend needs, or None.
        rank, world_size: this process in the group, and the group's size.
        device_group: None, or a process group of the same ranks that moves CUDA tensors (NCCL). Its owner sets it
            before first use; without one, managers that need one make their own.
        dp_group, tp_group: None, or the engine's data- and tensor-parallel coordinators, for readers of vLLM's
            attributes. They do not change who exchanges tokens: all ranks of cpu_group do.
        handle_cache: the living ops.
    """

    backend: ClassVar[str] = ""
    capabilities: ClassVar[Capabilities] = Capabilities(has_handles=False)
    library: ClassVar[Library | None] = None

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
        self._groups: DeviceGroups | None = None
        self._closed = self._closes_alone = False

    @property
    def groups(self) -> DeviceGroups:
        """Process groups by device; made on first use, on every rank."""
        if self._groups is None:
            self._groups = DeviceGroups(self.cpu_group, self.device_group, self._rendezvous)
        return self._groups

    @functools.cached_property
    def _rendezvous(self) -> Rendezvous:
        """Where the ranks meet to build ops; made on first use, on every rank."""
        return Rendezvous(self.cpu_group)

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
        """The device of the ops' memory: the current CUDA device, or CPU without one; settable before the first op.

        Raises:
            ConfigError: on setting it to a device that torch cannot use.
            StateError: on setting it after an op has been made.
        """
        if self._device is None:
            self._device = _with_index("cuda" if torch.cuda.is_available() else "cpu")
        return self._device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        if self._device_in_use:
            raise StateError("device to be set before the first op", "an op exists", "Create a new manager.")
        self._device = _with_index(device)

    def topology(self, gpu_per_node: int | None = None) -> Topology:
        """Nodes of the group. The first call is collective; later ones, with any `gpu_per_node`, are local.

        Args:
            gpu_per_node: None goes by the facts; a number cuts virtual nodes of that many ranks.

        Raises:
            ConfigError: gpu_per_node does not fit the real nodes.
            ConfigMismatchError: another rank has raised an error; this one names the rank and the error's text.
        """
        with self._rendezvous.telling():
            with self._lock:
                if self._report is None:
                    self._report = gather_report(self.cpu_group, self._rendezvous)
            return classify(self._report, gpu_per_node)

    @property
    def internode(self) -> bool:
        """Whether the group spans several nodes. The first reading is collective: read it on every rank."""
        return self.topology().internode

    def explain(self, gpu_per_node: int | None = None, max_tokens: int | None = None) -> dict[str, str]:
        """Returns backend, kernel, kernel_reason, device and topology as text. Collective like `topology`.

        Args:
            gpu_per_node: see `topology`.
            max_tokens: the op's `max_num_tokens_per_dp_rank`, by which some backends pick a kernel between nodes;
                None names every kernel that they may pick.
        """
        topology = self.topology(gpu_per_node)
        kernel, kernel_reason = self.kernel_for(topology.num_nodes, max_tokens)
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
    def kernel_for(cls, num_nodes: int, max_tokens: int | None = None) -> tuple[str, str]:
        """Returns the name of the kernel or library that moves the tokens, and the reason. Local.

        Args:
            num_nodes: nodes of the group.
            max_tokens: see `explain`.
        """
        raise UnsupportedError(
            "a backend that names its kernel", f"{cls.backend!r}, which does not", "Define kernel_for."
        )

    def get_handle(self, kwargs: Mapping[str, Any], index: int = 0) -> Any:
        """Returns the op for these handle kwargs. Kwargs of equal meaning share one op. Collective when the op is new.

        The manager keeps the op weakly: hold it on every rank for as long as any rank uses it.

        Args:
            kwargs: vLLM's and AITER's handle kwargs (see config_from_handle_kwargs); all but rank and num_local_experts
                are equal on all ranks.
            index: 0 or more, equal on all ranks; ops whose steps overlap (micro-batches) need different indices.

        Raises:
            UnknownNameError, ConfigError: a kwarg is unknown, or it or the index is impossible.
            UnsupportedError: the backend cannot serve this config, on this machine or between these nodes.
            HostMemoryError: on CPU, ranks of the node do not share /dev/shm.
            ConfigMismatchError: the ranks do not build the same op, or another rank has raised an error; this one names
                the rank and the error's text.
            RankTimeoutError: the ranks do not build the op together.
        """
        with self._rendezvous.telling():
            return self._get_handle(kwargs, index)

    def _get_handle(self, kwargs: Mapping[str, Any], index: int) -> Any:
        """Returns what `get_handle` returns. The caller tells the other ranks of errors."""
        self._require_open()
        cls = type(self)
        if cls._make_op is All2AllManagerBase._make_op:
            raise self._unsupported("get_handle")
        topology = self.topology(kwargs.get("gpu_per_node"))
        self._check_nodes(topology)
        kwargs = {"gpu_per_node": topology.gpu_per_node, **kwargs}
        config = config_from_handle_kwargs(kwargs, topology.internode)
        index = checked_integer("index", index, 0)
        self._check(config, topology, index)
        self._device_in_use = True
        make = functools.partial(self._make_op, config, topology, index)
        return self.handle_cache.get_or_create((config, index), make)

    def _check_nodes(self, topology: Topology) -> None:
        """Raises where no op of the backend serves these nodes."""

    def _check(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> None:
        """Raises where this rank cannot build the op."""
        refusal = self.capabilities.refusal(self.backend, config, topology.num_nodes, index)
        if refusal is not None:
            raise refusal

    def _make_op(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> Any:
        """Returns a new op. Collective."""
        raise self._unsupported("get_handle")

    @outside_graphs
    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
        *,
        tag: int = 0,
    ) -> DispatchedLogits:
        """Gathers every rank's hidden states [sum T_r, H] and router logits [sum T_r, E], in rank order.

        Args:
            hidden_states, router_logits: this rank's T_r rows.
            is_sequence_parallel: without effect: all ranks of the group exchange in either case.
            extra_tensors: further tensors of T_r rows; gathered likewise and returned as a list at the end.
            tag: see `dispatch`.

        Raises:
            UnsupportedError: the backend moves tokens with their ids only.
            ShapeError, DeviceError: the tensors do not fit each other.
            ConfigMismatchError: another rank's tensors have other dtypes or row shapes, or its tag differs.
            AlternationError: the dispatch before has not been combined.
            RankTimeoutError: on CPU, a rank did not come within EP_A2A_TIMEOUT_SECS.
        """
        hidden, logits, *extra = self._dispatch_logits([hidden_states, router_logits, *(extra_tensors or ())], tag)
        return (hidden, logits) if extra_tensors is None else (hidden, logits, extra)

    def _dispatch_logits(self, tensors: Sequence[torch.Tensor], tag: int) -> list[torch.Tensor]:
        """Returns the rows that come for each of `tensors`: hidden states, router logits, further ones."""
        raise self._unsupported("dispatch_router_logits", "naive or allgather_reducescatter")

    @outside_graphs
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor | bool | None = None,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
        *,
        handle: Any = None,
        tag: int = 0,
    ) -> DispatchedTokens | DispatchedLogits:
        """Brings this rank the tokens of all ranks that name one of its experts, and on some backends all others, too.

        vLLM passes three tensors. AITER passes (hidden_states, router_logits, is_sequence_parallel): without topk_ids,
        or with a bool in its place, this is `dispatch_router_logits`.

        Args:
            hidden_states: [T, H], this rank's tokens; T may differ, from 0 to the handle's max_num_tokens_per_dp_rank.
            topk_weights, topk_ids: [T, K] of any floating and any integer dtype; ids are global, others are dropped.
            is_sequence_parallel: without effect: all ranks of the group exchange in either case.
            extra_tensors: further tensors of T rows, which travel likewise.
            handle: the op of this manager that moves the rows, the same on all ranks; None is its only living one.
                Backends on torch.distributed need none.
            tag: the layer's number, at least 0, equal on all ranks. A rank that leaves out a layer would exchange the
                next one's rows with the others, silently; where tags differ, all raise ConfigMismatchError.

        Returns:
            (hidden_states [N, H], topk_weights [N, K], topk_ids [N, K]), and with extra_tensors their list, of the
            given dtypes, valid until `combine`. Rows ascend by (source rank, source token) and carry all K ids and
            weights of their token. The host waits once.

        Raises:
            StateError: `ep_a2a` has no living handle, or several and is told none.
            AlternationError: the dispatch before has not been combined.
            UnsupportedError: not in this backend, in a graph's capture, in expert_major or with a cast in dispatch.
            InputError: a tensor does not fit; nothing was launched.
            RankTimeoutError, CapacityError, ConfigMismatchError: the step failed. Call `reset` on every rank.
        """
        if not isinstance(topk_ids, torch.Tensor):
            is_sequence_parallel = bool(topk_ids) or is_sequence_parallel
            return self.dispatch_router_logits(
                hidden_states, topk_weights, is_sequence_parallel, extra_tensors, tag=tag
            )
        tensors = [hidden_states, topk_weights, topk_ids, *(extra_tensors or ())]
        hidden, weights, ids, *extra = self._dispatch_rows(tensors, handle, tag)
        return (hidden, weights, ids) if extra_tensors is None else (hidden, weights, ids, extra)

    def _dispatch_rows(self, tensors: Sequence[torch.Tensor], handle: Any, tag: int) -> list[torch.Tensor]:
        """Returns the rows that come for each of `tensors`: hidden states, weights, ids, further ones."""
        raise self._unsupported("dispatch")

    @outside_graphs
    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """Returns this rank's tokens [T, H], each the sum of its experts' rows over all ranks.

        Args:
            hidden_states: [N, H], one row per row that `dispatch` returned, in the same order: the sum of this rank's
                experts for that token, already multiplied by the router's weights. Every one of the N rows is added,
                so a row must be zeros where no expert of this rank is named. `ep_a2a` returns no such rows from
                `dispatch`; the backends on torch.distributed return the rows of all tokens of all ranks.
            is_sequence_parallel: without effect.
        """
        raise self._unsupported("combine")

    def reset(self) -> None:
        """Drops a step that a failure has left between `dispatch` and `combine`; to be called on every rank."""
        self._require_open()
        raise self._unsupported("reset")

    def allocate_combine_input(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, is_sequence_parallel: bool = False
    ) -> torch.Tensor | None:
        """Returns memory that experts may write combine's input to; None where any memory is as good."""
        return None

    @outside_graphs
    def combine_into_output(
        self, hidden_states: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """Writes the result of `combine` into `output` [T, H] and returns `output`."""
        address_of("output", output)
        output.copy_(self.combine(hidden_states, is_sequence_parallel))
        return output

    def set_num_sms(self, num_sms: int) -> None:
        """Bounds the multiprocessors that communication occupies; 0 removes the bound."""
        raise self._unsupported("set_num_sms", "ep_a2a")

    def max_sms_used(self) -> int | None:
        """Returns the most multiprocessors that communication occupies; None without a bound."""
        return None

    def destroy(self, *, alone: bool = False) -> None:
        """Closes every live op and gives all memory back; to be called on every rank. A second call does nothing.

        Every other method and property but `closed` and `device` raises ClosedError from then on.

        Args:
            alone: wait for no other rank, as after an exception that only this rank may have.
        """
        if self._closed:
            return
        self._closed = True
        self._closes_alone = alone
        for op in self.handle_cache.handles():
            # those of a manager that was written for AITER or vLLM need not have it
            getattr(op, "close", lambda: None)()
        self.handle_cache.clear()
        self._release()
        become_closed(self, "manager", _CREATE, tells=("get_handle", "reset"))

    def close(self) -> None:
        """Calls `destroy`."""
        self.destroy()

    @property
    def closed(self) -> bool:
        """Whether `destroy` has been called."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.destroy(alone=kind is not None)

    def _release(self) -> None:
        """Frees the memory and groups that the manager owns besides ops. Called once."""
        if self._groups is not None:
            self._groups.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("an open manager", "a closed one", _CREATE)

    def _unsupported(self, method: str, others: str = "ep_a2a, naive or allgather_reducescatter") -> UnsupportedError:
        """Returns the refusal of a method; `others` are the backends that have it and need no other library."""
        return UnsupportedError(f"a backend that has {method}", f"{self.backend!r}, which has not", f"Use {others}.")


def _with_index(device: torch.device | str) -> torch.device:
    # Tensors always name their device's index, and devices are compared with theirs.
    try:
        found = torch.device(device)
        is_current = found.type == "cuda" and found.index is None
        return torch.device("cuda", torch.cuda.current_device()) if is_current else found
    except (RuntimeError, AssertionError, TypeError) as error:
        got = f"{device!r}: {str(error).partition(chr(10))[0]}"
        raise ConfigError("to be a device that torch can use", got, field="device") from error
