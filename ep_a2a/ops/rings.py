"""InterNodeV1, InterNodeV1LL and AsyncLL: an engine whose tokens cross nodes in rings of chunks."""

from collections.abc import Iterator

import torch

from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.constants import Exchange
from ep_a2a.kernels.layout import Stage
from ep_a2a.kernels.put_kernels import quiet_kernel
from ep_a2a.kernels.remote_mirror_kernels import put_mirrors_kernel
from ep_a2a.kernels.ring_combine_kernels import return_kernel
from ep_a2a.kernels.ring_dispatch_kernels import exchange_kernel
from ep_a2a.ops.arguments import SEND, LaunchWish, Stages
from ep_a2a.ops.intra_node import receiving_launch
from ep_a2a.ops.launches import TABLE, CombineForm, DispatchForm, KernelLaunch, no_operands, row_operands, sum_operands
from ep_a2a.ops.ring_launches import CHANNEL_REGISTERS, RING_WARPS, NodesEngine

CHANNEL_PROGRAMS_PER_SM = 2
"""Programs that take turns with the channels; each has one line in flight, so more hide more latency. With one for each
multiprocessor, and fewer that offer results, a round trip of 4096 tokens took 616 µs in place of 480 (InterNodeV1, two
H200s that stand for two nodes, 23 November; RING_WARPS has all figures)."""


class RingEngine(NodesEngine):
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
        super().__init__(config, table, device)
        self._puts = self.rings.by_puts and not self.kernels.interpreted
        self._quiet = CompiledKernel(quiet_kernel, (TABLE,), {}, 1, puts=True)
        self.recv_reads_inputs = not self.holds_a_step

    @property
    def num_channel_programs(self) -> int:
        """Programs that take turns with the channels. Their number follows from the config, never from a call.

        A program goes on to its next channel when the one before is done. Ranks that went through them in different
        orders could wait for each other, where not all programs run at once; in the interpreter none do.
        """
        return min(self.rings.num_channels, self.most_programs(CHANNEL_PROGRAMS_PER_SM) or 1)

    def _dispatch_launches(self, form: DispatchForm, stages: Stages, wish: LaunchWish) -> Iterator[KernelLaunch]:
        if stages.send:
            yield self.numbering(form, wish.block_num, finishes=stages == SEND and not self.holds_a_step)
            yield from self._put_mirrors(counts=True)
        sends = stages.send if self.holds_a_step else stages.receive
        if sends or stages.receive:
            yield self._exchange(form, stages, sends=sends)
        if stages.receive:
            yield receiving_launch(self.kernels, form)
        yield from self._put_mirrors()

    def _combine_launches(self, form: CombineForm, stages: Stages, wish: LaunchWish) -> Iterator[KernelLaunch]:
        if stages.send:
            yield self.offering(form, wish.block_num)
            yield from self._put_mirrors(flags=True, weights=form.has_weights)
        if stages.receive:
            yield self.kernels.launch(
                return_kernel,
                sum_operands,
                form.read_as(self.config),
                self.sum_constants(form),
                RING_WARPS,
                numbers=(form.num_tokens, self.config.rank),
                num_programs=self.num_channel_programs,
                max_registers=CHANNEL_REGISTERS,
                puts=self._puts,
            )
            yield from self._put_mirrors()

    def full_sized_launch(self, is_dispatch: bool, wish: LaunchWish) -> tuple[int, int, int]:
        """(programs, those that exchange chunks between nodes, warps per program) of a call with M tokens."""
        tokens = self.config.max_num_inp_token_per_rank
        num_programs = self.num_programs if is_dispatch else self.offering_programs
        return num_programs(tokens, wish.block_num), self.num_channel_programs, RING_WARPS

    def quiet(self) -> None:
        """Launch a kernel that completes after all outstanding puts; no-op for direct stores."""
        if self._puts:
            self._quiet.run(1, (self.kernels.table,), self.kernels.device)

    def _put_mirrors(
        self, *, counts: bool = False, flags: bool = False, weights: bool = False
    ) -> Iterator[KernelLaunch]:
        """Puts failures, and the named kinds of words, to ranks that kernels cannot store to (put_mirrors_kernel)."""
        world_size, gpus_per_node = self.config.world_size, self.rings.gpus_per_node
        if self.rings.by_puts and world_size > gpus_per_node:
            yield self.kernels.launch(
                put_mirrors_kernel,
                no_operands,
                None,
                {
                    "GPUS": gpus_per_node,
                    "S": self.kernels.shape,
                    "TELLS_COUNTS": counts,
                    "TELLS_FLAGS": flags,
                    "HAS_WEIGHTS": weights,
                },
                1,
                numbers=(self.config.rank,),
                num_programs=world_size - gpus_per_node,
                puts=self._puts,
            )

    def _exchange(self, form: DispatchForm, stages: Stages, *, sends: bool) -> KernelLaunch:
        config = self.config
        exchange = Exchange(
            SENDS=sends,
            FORWARDS=stages.receive,
            STAGE=int(Stage.DISPATCH_SEND if stages.send else Stage.DISPATCH_RECEIVE),
            **self.wait_lanes,
        )
        sizes = form.num_tokens, form.bounds.first_row, form.bounds.num_rows
        return self.kernels.launch(
            exchange_kernel,
            row_operands,
            form.read_as(config),
            self.line_constants(form) | {"X": exchange},
            RING_WARPS,
            numbers=(*sizes, config.world_size * config.max_num_inp_token_per_rank, config.rank),
            num_programs=self.num_channel_programs,
            max_registers=CHANNEL_REGISTERS,
            puts=self._puts,
        )
