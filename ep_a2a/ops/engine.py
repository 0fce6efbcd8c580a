"""Engine: launches an op's kernels, compiles them and bounds the multiprocessors they use."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ep_a2a.config import CompiledCalls, Layout
from ep_a2a.kernels.compilation import compile_all
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.ops.arguments import NO_WISH, RECEIVE, SEND, WHOLE, CombineArguments, LaunchWish, Stages, Step, add_to_cache
from ep_a2a.ops.expert_major import expanding, reducing
from ep_a2a.ops.launches import CombineForm, DispatchForm, KernelLaunch, combine_forms, dispatch_forms
from ep_a2a.ops.op_kernels import OpKernels


class Engine(ABC):
    """Launches the dispatches and combines of one op. Three classes do: IntraNode-, Ring- and StagedEngine.

    An engine lists the launches of a call (`_dispatch_launches`, `_combine_launches`) as a function of the call's form.
    A list is made once for each form. The other methods follow from these lists.

    Attributes:
        kernels: the compiled kernels, and the bounds of their launches.
        recv_reads_inputs: whether the second half of a split dispatch reads the tensors that the first half was given.
    """

    kernels: OpKernels
    recv_reads_inputs: bool

    def dispatch(self, args: Step, stages: Stages = WHOLE, wish: LaunchWish = NO_WISH) -> None:
        """Launch a dispatch, or one of its halves, on the current stream. `wish` has the call's launch numbers."""
        self._run(self._whole_dispatch, args, DispatchForm.of(args), stages, wish)

    def combine(self, args: CombineArguments, stages: Stages = WHOLE, wish: LaunchWish = NO_WISH) -> None:
        """Launch a combine, or one of its halves, on the current stream. `wish` has the call's launch numbers."""
        if stages.send:
            for target, source in args.copies:
                target.copy_(source)
        self._run(self._whole_combine, args, CombineForm.of(args), stages, wish)

    def _run(self, launches_of: Callable[..., Iterable[KernelLaunch]], args: Any, *call: Any) -> None:
        """Launch what `launches_of` lists for calls of this form, stages and wish."""
        kernels, key = self.kernels, (launches_of.__name__, call)
        launches = kernels.plans.get(key)
        if launches is None:
            launches = list(launches_of(*call))
            if not kernels.interpreted and not all(launch.kernel.is_compiled for launch in launches):
                compile_all([launch.kernel for launch in launches], kernels.config)
                # the registers that kernels have got bound the programs of their launches
                launches = list(launches_of(*call))
            add_to_cache(kernels.plans, key, launches)
        table, device = kernels.table, kernels.device
        for kernel, operands, numbers, num_programs in launches:
            kernel.run(num_programs, (*operands(args, table), *numbers), device)

    def _whole_dispatch(self, form: DispatchForm, stages: Stages, wish: LaunchWish) -> Iterator[KernelLaunch]:
        yield from self._dispatch_launches(form, stages, wish)
        if stages.receive and self.kernels.config.layout == Layout.EXPERT_MAJOR:
            yield from expanding(self.kernels, form)

    def _whole_combine(self, form: CombineForm, stages: Stages, wish: LaunchWish) -> Iterator[KernelLaunch]:
        if stages.send and self.kernels.config.layout == Layout.EXPERT_MAJOR:
            yield reducing(self.kernels, form)
        yield from self._combine_launches(form, stages, wish)

    @abstractmethod
    def _dispatch_launches(self, form: DispatchForm, stages: Stages, wish: LaunchWish) -> Iterable[KernelLaunch]:
        """The launches of a dispatch, or of one of its halves, but those of layout expert_major."""

    @abstractmethod
    def _combine_launches(self, form: CombineForm, stages: Stages, wish: LaunchWish) -> Iterable[KernelLaunch]:
        """The launches of a combine, or of one of its halves, but those of layout expert_major."""

    @abstractmethod
    def full_sized_launch(self, is_dispatch: bool, wish: LaunchWish) -> tuple[int, int, int]:
        """(programs, those that exchange chunks between nodes, warps per program) of a call with M tokens."""

    def quiet(self) -> None:  # noqa: B027 - an engine that only stores has nothing to wait for
        """Launch a kernel that completes after all outstanding puts. Collective. Kernels that store need none."""

    def _sizes(self) -> Iterable[int]:
        """Bounds of steps, one at least of each kind whose kernels differ."""
        return (1,)

    def _reachable(self, stages: Stages) -> Iterator[CompiledKernel]:
        """The kernels that such calls can launch."""
        for size in self._sizes():
            for dispatch in dispatch_forms(self.kernels.config, size):
                yield from (launch.kernel for launch in self._whole_dispatch(dispatch, stages, NO_WISH))
        for size in self._sizes():
            for combine in combine_forms(self.kernels.config, size):
                yield from (launch.kernel for launch in self._whole_combine(combine, stages, NO_WISH))

    def count_local_experts(self, counts: torch.Tensor) -> None:
        """Launch the count of received slots per local expert into `counts`, int32 [E]."""
        kernels, config = self.kernels, self.kernels.config
        values = (kernels.table, config.rank, config.first_received_id, counts)
        kernels.count.run(counts.numel(), values, kernels.device)

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
        self.kernels.spans = True
        self.kernels.forget_plans()
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
        found = [kernel for stages in kernels.compiled_stages for kernel in self.compiled_kernels(stages)]
        compile_all(found, kernels.config)
        kernels.compiled_bounds.add(kernels.bound)

    def compiled_kernels(self, stages: Stages = WHOLE) -> list[CompiledKernel]:
        """Every kernel that such calls of the op can need, each once."""
        found = list(self._reachable(stages))
        if self.kernels.config.compiled_calls != CompiledCalls.SERVING:
            found.append(self.kernels.count)
        return list({id(kernel): kernel for kernel in found}.values())
