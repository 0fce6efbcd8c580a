"""make_op: an op on a torch process group, from the sizes of a MoE layer."""

from typing import Any

import torch
import torch.distributed as dist

from ep_a2a import errors
from ep_a2a.config import FP8_DTYPE, num_owned_experts
from ep_a2a.config.handle_kwargs import KWARG_OF_CONFIG_FIELD
from ep_a2a.managers.native import NativeAll2AllManager
from ep_a2a.memory.rendezvous import telling_before_the_first_meeting
from ep_a2a.ops.op import EpDispatchCombineOp

ARGUMENT_OF_KWARG = {
    "token_hidden_size": "hidden_size",
    "num_experts_per_token": "topk",
    "max_num_tokens_per_dp_rank": "max_tokens",
    "dispatch_quant_type": "quant",
    "input_dtype": "dtype",
    "data_type": "dtype",
    "num_local_experts": "num_experts",
}
"""make_op's argument that sets a handle kwarg, or field of the config, of another name."""


def make_op(
    group: dist.ProcessGroup | None = None,
    *,
    hidden_size: int,
    num_experts: int,
    topk: int,
    max_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    quant: str = "none",
    layout: str = "compact",
    on_rank_loss: str = "fail",
    mask_after_secs: float = 10.0,
    device: torch.device | str | None = None,
) -> EpDispatchCombineOp:
    """Make an op for the tokens of one MoE layer on a torch process group. Collective over the group.

    The ranks find out which of them share a node; on several nodes the op takes the kernels between nodes.
    All arguments but `group` and `device` must be equal on all ranks.

    Args:
        group: the ranks among which the experts are spread, of any backend; None is the world.
        hidden_size: elements of a token.
        num_experts: experts over all ranks. Rank r owns num_experts // W of them, in order of rank; the first
            num_experts % W ranks own one more.
        topk: experts that each token names.
        max_tokens: the most tokens that a rank dispatches in one step. Memory grows with it.
        dtype: of the tokens and of combine's result: bfloat16, float16 or float32.
        quant: cast inside dispatch: "none", "fp8_per_token", "fp8_per_1x128" (one scale per 128 elements), "mxfp8" (per
            32) or "fp8_static" (the scale is passed to dispatch).
        layout: order of the received rows: "compact", "rank_major" or "expert_major".
        on_rank_loss: "fail": when a rank's process ends, calls of the others raise. "mask": they go on without it, and
            slots of its experts count as dropped (layouts rank_major and expert_major, one node).
        mask_after_secs: with "mask", seconds of a wait after which a rank that lives, and waits for nobody itself, is
            masked, too; not in the first two steps, nor where EP_A2A_TIMEOUT_SECS is no longer than this.
        device: where the tensors live; None is the current CUDA device, or the CPU without one.

    Returns:
        The op. It owns its memory: `op.close()`, or the end of a `with` block, gives it back. Close it on every rank.

    Raises:
        NotInitializedError: there is no process group.
        InputError: `group` is no process group, or this rank is not in it; nothing was done.
        ConfigError, UnknownNameError: an argument is impossible.
        ConfigMismatchError: arguments differ between ranks, or another rank has raised an error; this one names the
            argument's field and the ranks, or the rank and the error's text.
        UnsupportedError: no kernel serves this machine or these nodes.
        RankTimeoutError: a rank did not come.
    """
    with telling_before_the_first_meeting(group or dist.group.WORLD):
        manager = OneOpManager(_checked(group))
        kwargs = {
            "rank": manager.rank,
            "num_ep_ranks": manager.world_size,
            "num_experts": num_experts,
            "token_hidden_size": hidden_size,
            "num_experts_per_token": topk,
            "max_num_tokens_per_dp_rank": max_tokens,
            "input_dtype": dtype,
            "quant_dtype": None if quant == "none" else FP8_DTYPE,
            "dispatch_quant_type": quant,
            "layout": layout,
            "on_rank_loss": on_rank_loss,
            "mask_after_secs": mask_after_secs,
        }
    return manager.make(device, kwargs)


class OneOpManager(NativeAll2AllManager):
    """The manager of make_op, whose one op destroys it."""

    def make(self, device: torch.device | str | None, kwargs: dict[str, Any]) -> EpDispatchCombineOp:
        """Returns the op; its errors name make_op's arguments. Collective."""
        with self._rendezvous.telling(), errors.max_tokens_named("max_tokens"):
            try:
                if device is not None:
                    self.device = device
                own = num_owned_experts(kwargs["num_experts"], self.world_size, self.rank)
                op: EpDispatchCombineOp = self._get_handle(kwargs | {"num_local_experts": own}, index=0)
            except (errors.ConfigError, errors.UnknownNameError, errors.ConfigMismatchError) as error:
                # before the other ranks are told of it
                kwarg = KWARG_OF_CONFIG_FIELD.get(error.field or "", error.field)
                error.field = ARGUMENT_OF_KWARG.get(kwarg or "", kwarg)
                if isinstance(error, errors.ConfigError):
                    error.remedy = "Correct the argument of make_op."
                raise
            op.close_after = self.destroy
            return op


def _checked(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group, or the world for None."""
    if group is None:
        if not dist.is_initialized():
            raise errors.NotInitializedError(
                "a torch process group", "none", "Call torch.distributed.init_process_group() first, or pass group=."
            )
        return dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        is_outside = group == dist.GroupMember.NON_GROUP_MEMBER
        raise errors.InputError(
            "to be a torch process group that this rank is in",
            "a group without this rank" if is_outside else repr(group),
            "Call make_op only on the ranks of the group, with the group that torch.distributed.new_group returned.",
            field="group",
        )
    return group
