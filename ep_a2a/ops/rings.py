"""InterNodeV1, InterNodeV1LL and AsyncLL: an engine whose tokens cross nodes in rings of chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a.kernels.compiled_kernel import CompiledKernel, linked_with_nvshmem
from ep_a2a.kernels.constants import Exchange, constants
from ep_a2a.kernels.layout import Stage
from ep_a2a.kernels.put_kernels import quiet_kernel
from ep_a2a.kernels.remote_mirror_kernels import put_mirrors_kernel
from ep_a2a.kernels.ring_combine_kernels import return_kernel
from ep_a2a.kernels.ring_dispatch_kernels import exchange_kernel
from ep_a2a.ops.arguments import SEND
from ep_a2a.ops.engine import Engine
from ep_a2a.ops.intra_node import combine_form, dispatch_form, receiving_launch, row_operands
from ep_a2a.ops.op_kernels import OpKernels
from ep_a2a.ops.ring_launches import CHANNEL_REGISTERS, OFFERING_PROGRAMS_PER_SM, RING_WARPS, RingLaunches

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.arguments import CombineArguments, LaunchWish, Stages, Step
    from ep_a2a.ops.engine import Launched

CHANNEL_PROGRAMS_PER_SM = 2
"""Programs that take turns with the channels; each has one line in flight."""


class RingEngine(Engine):
    """Launches the kernels of rings; every rank's memory must be addressable by all, by stores or by puts.

    A dispatch is three launches: row numbers, the exchange of chunks, and the receiving stage of IntraNode. A combine
    is two: results are offered to the node, and the exchange of sums. In split calls, an op whose rings hold a whole
    step sends its chunks in the first half; else only row numbers and results travel in the first half.

    Args:
        config: the op's.
        table: address table on the device, int64 [regions, W].
        device: where the kernels run; CPU means Triton's interpreter.
    """

    def __init__(self, config: EpDispatchCombineConfig, table: torch.Tensor, device: torch.device) -> None:
        self.kernels = OpKernels(config, table, device)
        self._ring = RingLaunches(self.kernels)
        self._linked: dict[str, Any] = {}
        if self._ring.rings.by_puts and not self.kernels.interpreted:
            self._linked = linked_with_nvshmem(device)
        self.recv_reads_inputs = not self._ring.holds_a_step

    @property
    def num_channel_programs(self) -> int:
        """Programs that take turns with the channels. Their number follows from the config, never from a call.

        A program goes on to its next channel when the one before is done. Ranks that went through them in different
        orders could wait for each other, where not all programs run at once; in the interpreter none do.
        """
        return min(self._ring.rings.num_channels, self._ring.most_programs(CHANNEL_PROGRAMS_PER_SM) or 1)

    def _dispatch_launches(self, args: Step, stages: Stages, wish: LaunchWish) -> Iterable[Launched]:
        ring = self._ring
        if stages.send:
            yield ring.numbering(args, wish.block_num, finishes=stages == SEND and not ring.holds_a_step)
            yield from self._put_mirrors(counts=True)
        sends, forwards = stages.send, stages.receive
        if not ring.holds_a_step:
            sends = stages.receive
        if sends or forwards:
            yield self._exchange(args, stages, sends=sends, forwards=forwards)
        if stages.receive:
            yield receiving_launch(self.kernels, args)
        yield from self._put_mirrors()

    def _combine_launches(self, args: CombineArguments, stages: Stages, wish: LaunchWish) -> Iterable[Launched]:
        if stages.send:
            yield self._ring.offering(args, wish.block_num)
            yield from self._put_mirrors(flags=True, weights=args.weights is not None)
        if stages.receive:
            yield self._return(args)
            yield from self._put_mirrors()

    def full_sized_launch(self, is_dispatch: bool, wish: LaunchWish) -> tuple[int, int, int]:
        """(programs, those that exchange chunks between nodes, warps per program) of a call with M tokens."""
        ring, tokens = self._ring, self.kernels.config.max_num_inp_token_per_rank
        num_programs = ring.num_programs(tokens, wish.block_num)
        if not is_dispatch:
            most_rows = self.kernels.config.world_size * tokens
            num_programs = ring.num_programs(most_rows, wish.block_num, OFFERING_PROGRAMS_PER_SM)
        return num_programs, self.num_channel_programs, RING_WARPS

    def quiet(self) -> None:
        """Launch a kernel that completes after all outstanding puts; no-op for direct stores."""
        kernels = self.kernels
        if self._ring.rings.by_puts and not kernels.interpreted:
            kernel = kernels.get("quiet", lambda: CompiledKernel(quiet_kernel, {}, 1, **self._linked))
            kernel.run(1, (kernels.table,), kernels.device)

    def _put_mirrors(self, *, counts: bool = False, flags: bool = False, weights: bool = False) -> Iterable[Launched]:
        """Puts failures, and the named kinds of words, to ranks that kernels cannot store to (put_mirrors_kernel)."""
        rings, config = self._ring.rings, self.kernels.config
        num_remote = config.world_size - rings.gpus_per_node
        if not rings.by_puts or not num_remote:
            return
        given = {
            "GPUS": rings.gpus_per_node,
            "WORLD_SIZE": config.world_size,
            "TELLS_COUNTS": counts,
            "TELLS_FLAGS": flags,
            "HAS_WEIGHTS": weights,
        }
        key = "put mirrors", counts, flags, weights
        kernel = self.kernels.get(key, lambda: CompiledKernel(put_mirrors_kernel, given, 1, **self._linked))
        yield kernel, (self.kernels.table, config.rank), num_remote

    def _exchange(self, args: Step, stages: Stages, *, sends: bool, forwards: bool) -> Launched:
        kernels, config, ring = self.kernels, self.kernels.config, self._ring

        def make() -> CompiledKernel:
            exchange = {
                "SENDS": sends,
                "FORWARDS": forwards,
                "FINISHES": stages.send,
                **ring.wait_lanes,
                "STAGE": int(Stage.DISPATCH_SEND if stages.send else Stage.DISPATCH_RECEIVE),
            }
            given = ring.line_constants(args) | {"X": constants(Exchange, exchange)}
            return CompiledKernel(exchange_kernel, given, RING_WARPS, CHANNEL_REGISTERS, **self._linked)

        values = (
            *row_operands(kernels, args, kernels.scale_bytes(args.scales)),
            args.num_tokens,
            args.step_tokens,
            args.row_limit,
            config.world_size * config.max_num_inp_token_per_rank,
            config.rank,
        )
        key = "exchange", dispatch_form(args), stages
        return kernels.get(key, make), values, self.num_channel_programs

    def _return(self, args: CombineArguments) -> Launched:
        kernels = self.kernels

        def make() -> CompiledKernel:
            given = self._ring.sum_constants(args)
            return CompiledKernel(return_kernel, given, RING_WARPS, CHANNEL_REGISTERS, **self._linked)

        ids = kernels.absent if args.ids is None else args.ids
        values = (args.out, ids, *args.biases, kernels.table, args.num_tokens, kernels.config.rank)
        key = "return", combine_form(args)
        return kernels.get(key, make), values, self.num_channel_programs
