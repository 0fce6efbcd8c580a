"""Engine: launches an op's kernels, compiles them and bounds the multiprocessors they use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ep_a2a.kernels.compilation import compile_all
from ep_a2a.ops.arguments import NO_WISH, RECEIVE, SEND, WHOLE
from ep_a2a.ops.expert_major import ExpertMajorKernels
from ep_a2a.ops.inputs import scales_travel
from ep_a2a.ops.warmup_args import warmup_combines, warmup_dispatches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from ep_a2a.kernels.compiled_kernel import CompiledKernel
    from ep_a2a.ops.arguments import CombineArguments, LaunchWish, Stages, Step
    from ep_a2a.ops.op_kernels import OpKernels


Launched = tuple["CompiledKernel", tuple[Any, ...], int]
"""A launch: kernel, run-time arguments, programs."""


class Engine(ABC):
    """Launches the dispatches and combines of one op. Three classes do: IntraNode-, Ring- and StagedEngine.

    An engine lists the launches of a call (`_dispatch_launches`, `_combine_launches`); the other methods follow from
    these lists, but where an engine has its own.

    Attributes:
        kernels: the compiled kernels, and the bounds of their launches.
        recv_reads_inputs: whether the second half of a split dispatch reads the tensors that the first half was given.
    """

    kernels: OpKernels
    recv_reads_inputs: bool

    def dispatch(self, args: Step, stages: Stages = WHOLE, wish: LaunchWish = NO_WISH) -> None:
        """Launch a dispatch, or one of its halves, on the current stream. `wish` has the call's launch numbers."""
        for kernel, values, num_programs in self._dispatch_launches(args, stages, wish):
            kernel.run(num_programs, values, self.kernels.device)
        if stages.receive:
            self._expand(args)

    def combine(self, args: CombineArguments, stages: Stages = WHOLE, wish: LaunchWish = NO_WISH) -> None:
        """Launch a combine, or one of its halves, on the current stream. `wish` has the call's launch numbers."""
        if stages.send:
            self._prepare_rows(args)
        for kernel, values, num_programs in self._combine_launches(args, stages, wish):
            kernel.run(num_programs, values, self.kernels.device)

    @abstractmethod
    def _dispatch_launches(self, args: Step, stages: Stages, wish: LaunchWish) -> Iterable[Launched]:
        """The launches of a dispatch, or of one of its halves, but those of layout expert_major."""

    @abstractmethod
    def _combine_launches(self, args: CombineArguments, stages: Stages, wish: LaunchWish) -> Iterable[Launched]:
        """The launches of a combine, or of one of its halves, but those of layout expert_major."""

    def _expand(self, args: Step) -> None:
        """In layout expert_major, launch the copy of the received rows to a block for each expert."""
        if self.kernels.by_expert is not None:
            self.kernels.by_expert.expand(args.step_tokens, scales_travel(self.kernels.config, args.scales))

    def _prepare_rows(self, args: CombineArguments) -> None:
        """Launch the copies before a combine, and in layout expert_major the weighted sums of the experts' rows."""
        for target, source in args.copies:
            target.copy_(source)
        if self.kernels.by_expert is not None and args.expert_rows is not None:
            self.kernels.by_expert.reduce(args.expert_rows, args.step_tokens)

    @abstractmethod
    def full_sized_launch(self, is_dispatch: bool, wish: LaunchWish) -> tuple[int, int, int]:
        """(programs, those that exchange chunks between nodes, warps per program) of a call with M tokens."""

    def quiet(self) -> None:  # noqa: B027 - an engine that only stores has nothing to wait for
        """Launch a kernel that completes after all outstanding puts. Collective. Kernels that store need none."""

    def _reachable(self, stages: Stages) -> Iterator[tuple[CompiledKernel, tuple[Any, ...]]]:
        """Kernels that such calls can launch, with stand-in arguments."""
        for dispatch in warmup_dispatches(self.kernels.config, self.kernels.device):
            yield from (launch[:2] for launch in self._dispatch_launches(dispatch, stages, NO_WISH))
        for combine in warmup_combines(self.kernels.config, self.kernels.device):
            yield from (launch[:2] for launch in self._combine_launches(combine, stages, NO_WISH))

    def count_local_experts(self, counts: torch.Tensor, step_tokens: int) -> None:
        """Launch the count of received slots per local expert into `counts`, int32 [E]."""
        self.kernels.count_local_experts(counts, step_tokens)

    def limit_sms(self, max_sms: int, whose: str = "caller", *, shares_sm: bool | None = None) -> None:
        """Bound the multiprocessors of launches from now on; the least of all bounds counts, 0 = none of this name.

        shares_sm: whether products run on them at the same time; None = as set before.
        """
        kernels = self.kernels
        kernels.limit_sms(max_sms, whose, shares_sm=shares_sm)
        if kernels.made and kernels.bound not in kernels.compiled_bounds:
            self.compile()

    def record_spans(self) -> None:
        """Launch kernels that note when their programs begin and end, from now on."""
        kernels = self.kernels
        kernels.spans = True
        kernels.forget_plans()
        if kernels.by_expert is not None:
            kernels.by_expert = ExpertMajorKernels(kernels)
        self.compile()

    def warmup_split(self) -> None:
        """Compile the kernels of split calls, now and at every later `compile`."""
        self.kernels.compiled_stages = (WHOLE, SEND, RECEIVE)
        self.kernels.compiled_bounds.clear()
        self.compile()

    def compile(self) -> None:
        """Compile and load every kernel that whole calls without own launch numbers can reach; launch nothing.

        Split calls are compiled when they are first used, or by warmup_split.
        """
        kernels = self.kernels
        if kernels.interpreted:
            return
        found = [each for stages in kernels.compiled_stages for each in self.compiled_kernels(stages)]
        compile_all(found, kernels.config)
        kernels.compiled_bounds.add(kernels.bound)

    def compiled_kernels(self, stages: Stages = WHOLE) -> list[tuple[CompiledKernel, tuple[Any, ...]]]:
        """Every (kernel, run-time arguments) that such calls of the op can need, each once, with stand-in tensors."""
        found = (*self._reachable(stages), *self.kernels.local_kernels())
        # several launch shapes have one kernel where the device knows no dependent launch
        return list({id(kernel): (kernel, values) for kernel, values in found}.values())
