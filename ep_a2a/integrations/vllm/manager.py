"""The manager that vLLM's expert-parallel communicator carries."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ep_a2a import env
from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm.common import logger, unreadable_variable, warn_once
from ep_a2a.integrations.vllm.counters import LayerCounters
from ep_a2a.managers.native import NativeAll2AllManager

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ep_a2a.memory.rendezvous import Rendezvous
    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.telemetry.counters import InstrumentedOp

MIB = 1 << 20

live_managers: weakref.WeakSet[VllmAll2AllManager] = weakref.WeakSet()
"""Those of this process that have not been destroyed; a worker has one."""


def _refusal(method: str, purpose: str) -> Callable[..., NoReturn]:
    """Returns a method that raises UnsupportedError, in place of one that only vLLM's managers offer."""

    def refuse(*_: Any) -> NoReturn:
        raise UnsupportedError(
            f"a backend that has {method}, for {purpose}", "'ep_a2a', which has not", "Do without it in vLLM's options."
        )

    return refuse


def _group_timeout_secs(group: Any) -> float:
    """The time-out that vLLM gave to a process group (gloo)."""
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


class VllmAll2AllManager(NativeAll2AllManager):
    """Makes ops for layers with a modular kernel; hidden states of other layers travel by vLLM's own manager.

    Args:
        communicator: vLLM's, of the expert-parallel group.
        vllm_manager: vLLM's allgather_reducescatter manager of the same group.
        num_micro_batches: into so many parts vLLM may split a step (dual batch overlap); 1 = it splits none.

    Attributes:
        counters: of the layers; None without EP_A2A_COUNTERS.
        combines_in_halves: whether shared experts run between the halves of combine; False by default.
    """

    support_fault_tolerance = False
    query_active_mask = _refusal("query_active_mask", "fault tolerance")
    query_fault = _refusal("query_fault", "fault tolerance")
    clean_buffers = _refusal("clean_buffers", "fault tolerance")
    checkpoint_prepare = _refusal("checkpoint_prepare", "checkpoints of a process")
    checkpoint_restore = _refusal("checkpoint_restore", "checkpoints of a process")
    stage_ep_size = _refusal("stage_ep_size", "elastic expert parallelism")
    commit_ep_size = _refusal("commit_ep_size", "elastic expert parallelism")
    mask_remote_ranks = _refusal("mask_remote_ranks", "elastic expert parallelism")

    def __init__(self, communicator: Any, vllm_manager: Any, num_micro_batches: int = 1) -> None:
        from vllm.distributed import parallel_state

        super().__init__(communicator.cpu_group)
        self.device = communicator.device
        self.device_group = communicator.device_group
        self.dp_group, self.tp_group = parallel_state.get_dp_group(), parallel_state.get_tp_group()
        self._vllm_manager, self._num_micro_batches = vllm_manager, num_micro_batches
        self._ops: list[EpDispatchCombineOp] = []
        self._layers: list[Any] = []
        self._step_timeout_secs: float | None = None
        self._unreadable = unreadable_variable()
        # raised on all ranks together, when the first op is made
        self.counters = None if self._unreadable else LayerCounters.wanted()
        self.combines_in_halves = self._unreadable is None and env.SHARED_EXPERTS.get() == "halves"
        live_managers.add(self)

    def get_handle(self, kwargs: Mapping[str, Any], index: int = 0) -> EpDispatchCombineOp:
        """Returns the op for these kwargs. Collective when it is new; kept until `destroy`.

        CUDA graphs hold the op's addresses when no layer does.

        Raises:
            EnvironmentVariableError: a variable cannot be parsed here; the other ranks raise ConfigMismatchError.
        """
        # The time-out is part of the op's key. It must be the same after warm-up: layers that are built again, with
        # new weights, must get the op that graphs have captured.
        rendezvous = self._wait_as_vllm_does()
        if not self._ops:
            rendezvous.agree("settings", self._unreadable)
        timeout_secs = rendezvous.timeout_secs
        op: EpDispatchCombineOp = super().get_handle({"timeout_secs": timeout_secs, **kwargs}, index)
        if op not in self._ops:
            self._ops.append(op)
            if self._step_timeout_secs is not None:
                op.set_timeout(self._step_timeout_secs)
            # the op of whole steps is the last one of a shape
            if self.rank == 0 and index == 0:
                found = self.explain(kwargs.get("gpu_per_node"), op.config.max_num_inp_token_per_rank)
                over = "" if op.config.internode_transport == "auto" else f" over {op.config.internode_transport}"
                logger.info(
                    "%s: %s kernels%s (%s), %s; %.1f MiB of buffers on this device",
                    found["backend"],
                    found["kernel"],
                    over,
                    found["kernel_reason"],
                    found["topology"],
                    self.num_buffer_bytes / MIB,
                )
        return op

    def micro_batch_ops(self, kwargs_of: Callable[[int], Mapping[str, Any]]) -> list[EpDispatchCombineOp]:
        """Returns the op of each micro-batch, of which the first also serves whole steps. Collective where new.

        Where vLLM splits steps, it bounds the multiprocessors of calls while it does: kernels for that are compiled.

        Args:
            kwargs_of: returns the handle kwargs for one of so many micro-batches.
        """
        number = self._num_micro_batches
        others = [self.get_handle(kwargs_of(number), index) for index in range(1, number)]
        ops = [self.get_handle(kwargs_of(1)), *others]
        if number > 1:
            from vllm import envs

            for op in ops:
                op.set_max_sms(envs.VLLM_DBO_COMM_SMS)
                op.set_max_sms(self.max_sms_used() or 0)
        return ops

    def _wait_as_vllm_does(self) -> Rendezvous:
        """Returns the rendezvous, with vLLM's time-out: ranks load, compile and capture at their own pace."""
        rendezvous = self.arena.rendezvous
        rendezvous.timeout_secs = _group_timeout_secs(self.cpu_group)
        return rendezvous

    def layer_number(self, moe: Any) -> int:
        """Returns the number of a layer, from 1, in the order in which layers are built; equal on all ranks.

        A layer that is built again, with other weights, keeps its number: graphs hold it.

        Args:
            moe: the layer's FusedMoEConfig, of which vLLM makes one per layer.
        """
        for number, other in enumerate(self._layers, 1):
            if other is moe:
                return number
        self._layers.append(moe)
        return len(self._layers)

    def exchange_of(self, op: EpDispatchCombineOp, moe: Any) -> EpDispatchCombineOp | InstrumentedOp:
        """Returns the op that a layer calls, or with EP_A2A_COUNTERS a wrapper that counts its calls.

        Args:
            op: the layer's. moe: its FusedMoEConfig.
        """
        return op if self.counters is None else self.counters.exchange_of(op, moe, self.layer_number(moe))

    def check(self) -> None:
        """Raises the first error that kernels of finished steps have recorded.

        With tensor parallelism, errors of the other ranks count, too: these ranks gather each other's results, and
        vLLM looks at the errors of one of them only.
        """
        for op in self._ops:
            op.check()
        if self._ops and self.tp_group.world_size > 1:
            # Triton is loaded when the first op is made
            from ep_a2a.ops.failures import check_peers

            for op in self._ops:
                check_peers(op)

    def close_open_steps(self) -> None:
        """Closes ops that an error has left between dispatch and combine, so that later calls raise and do not wait."""
        for op in self._ops:
            if op.has_open_step:
                op.close()

    def end_warm_up(self, timeout_secs: float) -> None:
        """Bounds waits by `timeout_secs` once all ranks have warmed up, and clears the counters. Collective."""
        if self._step_timeout_secs is not None or not self._ops:
            return
        self.arena.rendezvous.barrier("the end of warm-up")
        self._step_timeout_secs = timeout_secs
        for op in self._ops:
            op.set_timeout(timeout_secs)
        if self.counters is not None:
            self.counters.clear()

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatches hidden states by vLLM's own manager, for layers without a modular kernel."""
        return self._by_vllm("dispatch", *args, **kwargs)

    def dispatch_router_logits(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatches router logits by vLLM's own manager, for layers without a modular kernel."""
        return self._by_vllm("dispatch_router_logits", *args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        """Combines hidden states by vLLM's own manager, for layers without a modular kernel."""
        return self._by_vllm("combine", *args, **kwargs)

    def _by_vllm(self, method: str, *args: Any, **kwargs: Any) -> Any:
        warn_once(
            "a MoE layer does not run as a modular kernel of ep_a2a (its quantisation method has none, or it belongs "
            "to a draft model with a configuration of its own): its tokens travel by vLLM's allgather_reducescatter"
        )
        return getattr(self._vllm_manager, method)(*args, **kwargs)

    def _release(self) -> None:
        self._ops.clear()
        self._layers.clear()
        # a reader that still holds this manager must find the counters of the next engine
        self.counters = None
        live_managers.discard(self)
        super()._release()
