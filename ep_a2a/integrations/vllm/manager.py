"""The manager that vLLM's expert-parallel communicator carries."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.manager import EngineManager
from ep_a2a.integrations.vllm.common import logger, warn_once

if TYPE_CHECKING:
    from collections.abc import Mapping


class VllmAll2AllManager(EngineManager):
    """Of layers with a modular kernel; hidden states of other layers travel by vLLM's own manager.

    Args:
        communicator: vLLM's, of the expert-parallel group.
        vllm_manager: vLLM's allgather_reducescatter manager of the same group.
        num_micro_batches: into so many parts vLLM may split a step (dual batch overlap); 1 = it splits none.
        support_fault_tolerance: whether the ranks go on without one that is lost, as --enable-fault-tolerance asks.
    """

    logger = logger
    tokens_option = "--max-num-batched-tokens"

    def __init__(
        self, communicator: Any, vllm_manager: Any, num_micro_batches: int = 1, *, support_fault_tolerance: bool = False
    ) -> None:
        from vllm import envs
        from vllm.distributed import parallel_state

        super().__init__(communicator.cpu_group, num_micro_batches, envs.VLLM_DBO_COMM_SMS)
        self.device = communicator.device
        self.device_group = communicator.device_group
        self.dp_group, self.tp_group = parallel_state.get_dp_group(), parallel_state.get_tp_group()
        self._vllm_manager, self.support_fault_tolerance = vllm_manager, support_fault_tolerance
        self._known_mask = torch.zeros(self.world_size, dtype=torch.int32, device=self.device)

    def _get_handle(self, kwargs: Mapping[str, Any], index: int) -> Any:
        more = {"on_rank_loss": "mask"} if self.support_fault_tolerance else {}
        return super()._get_handle({**kwargs, **more}, index)

    def query_active_mask(self) -> torch.Tensor:
        """Returns int32 [W] on the device: 1 for a rank that is masked, 0 for others."""
        ranks = torch.arange(self.world_size, dtype=torch.int32, device=self.device)
        # ranks are masked in all ops, one op after the other
        masked = [op.memory.poison.masked_there for op in self._ops]
        return (torch.cat([torch.zeros_like(ranks[:1]), *masked]).amax() >> ranks) & 1

    def query_fault(self) -> torch.Tensor:
        """Returns a bool on the device: whether a rank has been masked since `clean_buffers`."""
        return (self.query_active_mask() != self._known_mask).any()

    def clean_buffers(self) -> None:
        """Takes back the masks of ranks that live, and empties the ops' memory. Collective.

        Where a rank has died, the call is local: all masks stay, and ops go on without these ranks. Where one hangs,
        the others wait here until it comes.

        Raises:
            RankTimeoutError: ranks did not come.
        """
        if not self.gone_ranks():
            for op in self._ops:
                op.reset()
        self._known_mask = self.query_active_mask()

    def checkpoint_prepare(self) -> NoReturn:
        """Refuses checkpoints of the process: memory of peers that it has mapped would be gone."""
        raise UnsupportedError(
            "a backend that has checkpoint_prepare and checkpoint_restore", "'ep_a2a'", "Use allgather_reducescatter."
        )

    checkpoint_restore = checkpoint_prepare

    def _by_vllm(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Moves hidden states of a layer without a modular kernel by vLLM's own manager."""
        warn_once(
            "a MoE layer does not run as a modular kernel of ep_a2a (its quantisation method has none, or it belongs "
            "to a draft model with a configuration of its own): its tokens travel by vLLM's allgather_reducescatter"
        )
        return getattr(self._vllm_manager, method)(*args, **kwargs)

    dispatch = functools.partialmethod(_by_vllm, "dispatch")
    dispatch_router_logits = functools.partialmethod(_by_vllm, "dispatch_router_logits")
    combine = functools.partialmethod(_by_vllm, "combine")
    combine_into_output = functools.partialmethod(_by_vllm, "combine_into_output")
