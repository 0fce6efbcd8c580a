"""Base of DeepEP's `Buffer`: construction, streams and events, configs and size hints, refused methods."""

import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a.compat.deep_ep.ops import Handle, Ops, Step, Steps
from ep_a2a.compat.deep_ep.utils import CommStream, EventHandle, EventOverlap
from ep_a2a.compat.deep_ep_sizes import Config, chunk_configs, low_latency_bytes
from ep_a2a.compat.parameters import refused, remedy_of, warn_once, with_refusals
from ep_a2a.config import Layout
from ep_a2a.config.requirements import checked_integer, require
from ep_a2a.errors import ClosedError, UnsupportedError
from ep_a2a.interface import DispatchResult

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Rows, or rows and their scales."""

SM90 = (9, 0)
DEFAULT_QPS = 24


@with_refusals("deep_ep", "Buffer")
class BufferBase:
    """Base of `Buffer`, which documents the arguments."""

    num_sms: int = 20
    _max_sms: int = 0

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = DEFAULT_QPS,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        device: torch.device | str | None = None,
        max_num_tokens_per_rank: int = 0,
        max_open_steps: int = 2,
        gpus_per_node: int | None = None,
    ) -> None:
        if enable_shrink:
            raise refused("deep_ep", "Buffer", "enable_shrink")
        if group is None:
            raise UnsupportedError(
                "a torch process group", f"group None, comm {comm!r}", remedy_of("deep_ep", "Buffer", "comm")
            )
        ignored = {
            "num_nvl_bytes": num_nvl_bytes > 0,
            "num_rdma_bytes": num_rdma_bytes > 0,
            "num_qps_per_rank": num_qps_per_rank != DEFAULT_QPS,
            "allow_nvlink_for_low_latency_mode": not allow_nvlink_for_low_latency_mode,
            "allow_mnnvl": allow_mnnvl,
            "use_fabric": use_fabric,
        }
        warn_once("deep_ep", "Buffer", *(name for name, is_given in ignored.items() if is_given))
        self._steps = Steps(max_open_steps)
        self._ops = Ops(group, device, max_num_tokens_per_rank, gpus_per_node)
        self.group, self.rank, self.group_size = group, self._ops.rank, self._ops.world_size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy = explicitly_destroy
        self._stream = CommStream(self._ops.device)
        self._closed = False
        self._finalizer = weakref.finalize(self, _nothing if explicitly_destroy else self._ops.close)
        self._finalizer.atexit = False  # the operating system frees everything

    def destroy(self) -> None:
        """Frees all memory. Local; must be called on every rank. A second call does nothing."""
        self._closed = True
        self._finalizer.detach()
        self._steps.clear()
        self._ops.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether casts to fp8 work: on Hopper or later, and on CPU."""
        return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= SM90

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Bounds the multiprocessors of normal calls that are given no config, in all buffers of the process.

        Without a call of this there is no bound.

        Raises:
            ConfigError: an odd or a negative number.
        """
        require(checked_integer("new_num_sms", new_num_sms, 0) % 2 == 0, None, "an even number", str(new_num_sms))
        BufferBase.num_sms = BufferBase._max_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event after the work that has been launched on the current stream."""
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Returns DeepEP's config of dispatch, with `num_sms`. Raises UnsupportedError if DeepEP has none."""
        return replace(chunk_configs(num_ranks)[0], num_sms=cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Returns DeepEP's config of combine, with `num_sms`. Raises UnsupportedError if DeepEP has none."""
        return replace(chunk_configs(num_ranks)[1], num_sms=cls.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the bytes of DeepEP's low-latency buffers, by its formula. `ep-a2a plan` prints those of our ops.

        Raises:
            ConfigError: a number below 1.
        """
        sizes = {
            "num_max_dispatch_tokens_per_rank": num_max_dispatch_tokens_per_rank,
            "hidden": hidden,
            "num_ranks": num_ranks,
            "num_experts": num_experts,
        }
        for name, size in sizes.items():
            checked_integer(name, size, 1)
        return low_latency_bytes(hidden, num_max_dispatch_tokens_per_rank, num_experts)

    def get_comm_stream(self) -> Any:
        """Returns the CUDA stream of layouts and of calls with async_finish; on CPU a placeholder."""
        return self._stream.stream

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing: calls of both modes need no cleaned memory."""
        self._require_open()

    def _launch(
        self,
        handle: Handle,
        tokens: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None = None,
        *,
        num_sms: int = 0,
        in_halves: bool = False,
    ) -> DispatchResult:
        """Dispatches on an op of the handle's shape, or begins to, and makes that the handle's step."""
        index = self._steps.free_index()
        op = self._ops.get(handle.shape, index)
        self._ops.limit_sms(op, num_sms)
        dispatch = op.dispatch_send if in_halves else op.dispatch
        got = dispatch(tokens, weights, scales, handle.ids, step_tokens=handle.step_tokens)
        handle.step = Step(op, index)
        self._steps.add(handle.step, keeps_rows=handle.shape.layout is Layout.EXPERT_MAJOR)
        return got

    def _reopen(self, handle: Handle, weights: torch.Tensor | None, num_sms: int = 0) -> None:
        """Makes a handle's dispatch the open step of an op again, by a dispatch of zeros."""
        shape, ids = handle.shape, handle.ids
        zeros = torch.zeros(len(ids), shape.hidden_dim, dtype=shape.dtype, device=ids.device)
        self._launch(handle, zeros, weights, num_sms=num_sms)

    def _num_sms(self, config: Config | None) -> int:
        """Returns the most multiprocessors of a normal call; 0 = all."""
        return BufferBase._max_sms if config is None else config.num_sms

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("a buffer in use", "one that was destroyed", "Create a new Buffer.")


def _nothing() -> None:
    """Finaliser of a buffer with explicitly_destroy."""
