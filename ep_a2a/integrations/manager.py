"""The manager of an engine's expert-parallel group: ops that layers share, and what surrounds the engine's steps."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ep_a2a import __version__, env
from ep_a2a.errors import EpA2AError, max_tokens_named
from ep_a2a.integrations.dispatcher import Dispatcher
from ep_a2a.integrations.token_format import LayerShape, TokenFormat, handle_kwargs
from ep_a2a.managers.native import NativeAll2AllManager
from ep_a2a.memory.verdict import Verdict
from ep_a2a.ops.op import EpDispatchCombineOp

MIB = 1 << 20

live_managers: weakref.WeakSet[EngineManager] = weakref.WeakSet()
"""Those of this process that have not been destroyed; an engine's worker has one."""


@contextlib.contextmanager
def dead_ranks_named() -> Iterator[None]:
    """Turns an error of the engine's own exchanges into one that names the ranks whose processes have ended.

    Raises:
        RankTimeoutError: an error came that is none of this package, and processes of the group have ended.
    """
    try:
        yield
    except Exception as error:
        for manager in () if isinstance(error, EpA2AError) else live_managers:
            if gone := manager.gone_ranks():
                raise Verdict(gone).error(
                    manager.rank,
                    "every rank of the expert-parallel group to live",
                    f"{type(error).__name__}: {error}",
                    "Read the logs of the named ranks, and start the engine again.",
                ) from error
        raise


class EngineManager(NativeAll2AllManager):
    """Makes the dispatchers of an engine's MoE layers. Layers of one shape share ops, which live until `destroy`.

    Args:
        cpu_group: the expert-parallel group, of gloo. Ranks load, compile and capture at their own pace: until
            `end_warm_up` its time-out bounds all waits.
        num_micro_batches: into so many parts the engine may split a step; 1 = it splits none.
        split_max_sms: the engine bounds the multiprocessors of calls to this number where it splits a step.

    Raises:
        EnvironmentVariableError: an EP_A2A_* variable cannot be parsed.

    Attributes:
        logger: gets one line per shape on rank 0: kernels, topology, buffers, tokens, their format, waits, version.
        tokens_option: the engine's option that bounds the tokens of a step, for errors.
        split_max_sms: as given.
    """

    logger = logging.getLogger(__name__)
    tokens_option = "the tokens of a step"

    def __init__(self, cpu_group: ProcessGroup, num_micro_batches: int = 1, split_max_sms: int = 0) -> None:
        env.check_values()
        super().__init__(cpu_group)
        self._num_micro_batches, self.split_max_sms = num_micro_batches, split_max_sms
        self._ops: list[EpDispatchCombineOp] = []
        self._layers: list[Any] = []
        self._step_timeout_secs: float | None = None
        live_managers.add(self)

    def dispatchers(self, layer: Any, token_format: TokenFormat, shape: LayerShape) -> list[Dispatcher]:
        """Returns a layer's dispatcher for each micro-batch; the first one also serves whole steps. Collective.

        A layer that is built again, with other weights, gets the ops and the number of before: graphs hold them.

        Args:
            layer: what the engine has one of for each layer.
            token_format, shape: alike on all ranks but for num_local_experts.
        """
        with self._rendezvous.telling():
            parts = self._num_micro_batches
            ranks = {"rank": self.rank, "world_size": self.world_size}
            of_part, of_step = (handle_kwargs(token_format, shape.of_micro_batch(n), **ranks) for n in (parts, 1))
            num_known = len(self._ops)
            # the op of whole steps is the last one of a shape
            others = [self.get_handle(of_part, index) for index in range(1, parts)]
            ops = [self.get_handle(of_step), *others]
            if len(self._ops) > num_known and self.rank == 0:
                self._log(ops[0], token_format.advice)
            if parts > 1:
                # kernels for the bound are compiled
                for op in ops:
                    op.set_max_sms(self.split_max_sms)
                    op.set_max_sms(self.max_sms_used() or 0)
        number = self.layer_number(layer)
        # rows without a token name no expert of this rank
        pad_id = -1 if shape.local_ids else shape.num_experts - 1 if self.rank == 0 else 0
        # layers of one shape share the op: by the tag, a rank that leaves one out does not get another one's rows
        return [Dispatcher(op, pad_id=pad_id, tag=number) for op in ops]

    def layer_number(self, layer: Any) -> int:
        """Returns the number of a layer, from 1, in the order in which layers are built; equal on all ranks.

        Args:
            layer: see `dispatchers`.
        """
        for number, other in enumerate(self._layers, 1):
            if other is layer:
                return number
        self._layers.append(layer)
        return len(self._layers)

    def _get_handle(self, kwargs: Mapping[str, Any], index: int) -> EpDispatchCombineOp:
        """Returns the op, and keeps it until `destroy`: CUDA graphs hold the op's addresses when no layer does."""
        # The time-out is part of the op's key. It must be the same after warm-up: layers that are built again, with
        # new weights, must get the op that graphs have captured.
        timeout_secs = self._wait_as_the_group_does()
        if not self._ops:
            # with that patience: ranks learn about each other's GPUs with less
            self.arena.rendezvous.barrier("the first layer")
        with max_tokens_named(self.tokens_option):
            op: EpDispatchCombineOp = super()._get_handle({"timeout_secs": timeout_secs, **kwargs}, index)
        if op not in self._ops:
            self._ops.append(op)
            if self._step_timeout_secs is not None:
                op.set_timeout(self._step_timeout_secs)
        return op

    def _log(self, op: EpDispatchCombineOp, advice: str) -> None:
        config, cast = op.config, op.config.dispatch_quant.value
        per_node = config.gpu_per_node if config.gpu_per_node < self.world_size else None
        found = self.explain(per_node, config.max_num_inp_token_per_rank)
        transport = "" if config.internode_transport == "auto" else f" over {config.internode_transport}"
        interpreter = " in Triton's interpreter" if op.device.type == "cpu" else ""
        wire = str(config.data_type).removeprefix("torch.") if cast == "none" else cast
        facts = (
            f"{found['backend']}: {found['kernel']} kernels{transport}{interpreter} ({found['kernel_reason']})",
            found["topology"],
            f"{self.num_buffer_bytes / MIB:.1f} MiB of buffers on this device",
            f"at most {config.max_num_inp_token_per_rank} tokens per rank, as {wire}{advice and f' ({advice})'}",
            f"waits end after {config.timeout_secs:g} s, after warm-up {env.TIMEOUT_SECS.get():g} s",
            f"version {__version__}",
        )
        self.logger.info("%s", "; ".join(facts))

    def _wait_as_the_group_does(self) -> float:
        """Gives the rendezvous the process group's time-out, and returns it in seconds."""
        options: Any = self.cpu_group._get_backend(torch.device("cpu")).options
        self.arena.rendezvous.timeout_secs = timeout_secs = float(options._timeout.total_seconds())
        return timeout_secs

    def check(self) -> None:
        """Raises the first error that kernels of finished steps have recorded.

        With tensor parallelism, errors of the other ranks count, too: these ranks gather each other's results, and
        engines look at the errors of one of them only.
        """
        for op in self._ops:
            op.check()
        if self._ops and self.tp_group is not None and self.tp_group.world_size > 1:
            # Triton is loaded when the first op is made
            from ep_a2a.ops.failures import check_peers

            for op in self._ops:
                check_peers(op)

    def poison_words(self) -> list[torch.Tensor]:
        """The word of each op that kernels write failures of any rank to: int32 [1], code << 16 | accused rank."""
        return [op.memory.poison.word for op in self._ops]

    def gone_ranks(self) -> tuple[int, ...]:
        """Returns the ranks whose processes have ended; waits a second for deaths that are only just seen."""
        return self.arena.rendezvous.peers.settle() if self._ops else ()

    def close_open_steps(self) -> None:
        """Closes ops that an error has left between dispatch and combine, so that later calls raise and do not wait."""
        for op in self._ops:
            if not op.closed and op.has_open_step:
                op.close()

    def end_warm_up(self, timeout_secs: float) -> None:
        """Bounds waits by `timeout_secs` once all ranks have warmed up. Collective."""
        if self._step_timeout_secs is not None or not self._ops:
            return
        self.arena.rendezvous.barrier("the end of warm-up")
        self._step_timeout_secs = timeout_secs
        for op in self._ops:
            op.set_timeout(timeout_secs)

    def _release(self) -> None:
        self._ops.clear()
        self._layers.clear()
        live_managers.discard(self)
        super()._release()
