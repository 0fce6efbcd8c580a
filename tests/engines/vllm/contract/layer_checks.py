"""Checks of vLLM's layers on two ranks; each runs on every rank. See layer_cases."""

import contextlib
import inspect
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ep_a2a.errors import ClosedError, RankTimeoutError, StateError, TooManyTokensError
from ep_a2a.quantization import E4M3_MAX, quantize_mxfp8, quantize_static
from ep_a2a.routing import destination_mask, expert_ranges
from ep_a2a.testing import RankContext
from tests.engines.vllm.contract.checks import refused, replaced
from tests.engines.vllm.contract.layer_cases import Layer, kernel_of, manager_of, run_and_check, run_kernel, step_of
from tests.late import await_others, tell


def steps(context: RankContext, *cases: Layer) -> list[Any]:
    """One kernel, a step for each case; what the experts saw of each."""
    with manager_of(context) as manager:
        kernel = kernel_of(cases[0], manager)
        for case in cases:
            kernel.fused_experts.case = case
            run_and_check(case, kernel, context.rank)
        return list(kernel.fused_experts.seen)


def in_both_forms(context: RankContext, case: Layer) -> None:
    """With global ids in the rows, as experts on GPUs get them, and with local ones, as on CPU."""
    for with_map in (False, True):
        case = replace(case, with_map=with_map)
        steps(context, case, replace(case, seed=1, tokens=(16, 1)))


FORMS = {
    "bf16": Layer(),
    "fp8_per_token": Layer(quant="per_token"),
    "fp8_per_block": Layer(quant="per_block", hidden=256),
    "mxfp8": Layer(quant="mxfp8", hidden=256),
    # from vLLM 0.27 routers write -1 for rows that are padding
    "ids_of_padding_rows": Layer(ids="padding", tokens=(6, 5)),
    "ids_beside_valid_ones": Layer(ids="holes", tokens=(6, 5)),
    "a_rank_that_receives_nothing": Layer(ids="first rank"),
    "router_weights_on_the_input": Layer(topk=1, weight_on_input=True),
    "router_weights_on_the_input_of_fp8": Layer(topk=1, weight_on_input=True, quant="per_token"),
    "uneven_experts": Layer(num_experts=7, topk=3),
    "batched": Layer(batched=True),
    "batched_fp8_per_token": Layer(batched=True, quant="per_token"),
    "batched_fp8_per_block": Layer(batched=True, quant="per_block", hidden=256, num_experts=7, topk=3),
    "batched_fp8_by_whole_tensor": Layer(batched=True, quant="per_tensor"),
    "batched_weights_on_the_input": Layer(batched=True, topk=1, weight_on_input=True),
}
"""Checks in_both_forms."""


def check_fp8_per_block_with_scales_that_are_powers_of_two(context: RankContext) -> None:
    (seen,) = steps(context, Layer(quant="per_block_rounded", hidden=256))
    scales = seen.a1q_scale[seen.a1q_scale > 0]
    assert scales.numel()
    assert bool((torch.frexp(scales)[0] == 0.5).all())


def check_fp8_by_whole_tensor_ignores_rows_without_a_token(context: RankContext) -> None:
    """The buffers still hold the large tokens of the step before."""
    large = Layer(quant="per_tensor", scale=100.0, tokens=(16, 16))
    small = replace(large, scale=1.0, tokens=(3, 2), seed=1)
    seen = steps(context, large, small)
    received = []
    for rank in range(2):
        tokens, _, ids = small.inputs(rank)
        received.append(tokens[destination_mask(ids, small.num_experts, 2)[:, context.rank]])
    amax = torch.cat(received).float().abs().max()
    torch.testing.assert_close(seen[1].a1q_scale, (amax / E4M3_MAX).reshape(1))


def check_casts_are_vllms(_: RankContext) -> None:
    """Of all finite bf16. vLLM's static cast is CUDA code, so that it is compared with vLLM's own torch form of it."""
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import mxfp8_e4m3_quantize
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    values = values[values.isfinite()]
    mixed = values[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(1))]
    static = SimpleNamespace(
        is_group_quant=False, static=True, group_shape=GroupShape.PER_TENSOR, num_token_padding=None
    )
    for rows in (values.view(-1, 32), mixed.view(-1, 64)):
        for ours, theirs in zip(quantize_mxfp8(rows), mxfp8_e4m3_quantize(rows)):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        for scale in (torch.tensor([0.0371]), torch.tensor(17.0)):
            theirs, _ = QuantFP8.forward_native(static, rows, scale)
            assert torch.equal(quantize_static(rows, scale).view(torch.uint8), theirs.view(torch.uint8))


def check_ranks_without_tokens(context: RankContext) -> None:
    for tokens in ((0, 5), (3, 0), (0, 0)):
        steps(context, Layer(tokens=tokens), Layer(seed=1))


def check_experts_that_leave_the_sum_to_finalize(context: RankContext) -> None:
    for kind in ("Contiguous", "Delegate"):
        in_both_forms(context, Layer(reduce=kind))
        steps(context, Layer(reduce=kind, topk=1, weight_on_input=True))


def columns_of_padding(context: RankContext, **padded: bool) -> None:
    """Of each way: vLLM pads the hidden size, also for methods that pad tokens, or drop the columns, themselves."""
    for kind in ("NoOP", "Contiguous"):
        case = Layer(padding=48, reduce=kind, **padded)
        steps(context, case, replace(case, seed=1, tokens=(0, 2)))
    for quant in ("per_token", "per_block", "per_tensor"):
        steps(context, Layer(padding=48, hidden=256, quant=quant, **padded))


def check_rows_without_a_token_name_another_ranks_expert(context: RankContext) -> None:
    case = Layer(tokens=(2, 1), num_experts=7)
    (seen,) = steps(context, case)
    is_other = (seen.topk_ids >= 4) if context.rank == 0 else (seen.topk_ids < 4)
    received = sum(
        int(destination_mask(case.inputs(rank)[2], case.num_experts, 2)[:, context.rank].sum()) for rank in range(2)
    )
    assert seen.topk_ids.dtype == torch.int32
    assert int((~is_other).any(1).sum()) == received
    assert len(seen.rows) == 2 * case.max_tokens


def check_the_rows_that_experts_see_are_bounded_by_the_step(context: RankContext) -> None:
    """vLLM tells all ranks the tokens of each data-parallel rank; sequence-parallel ranks share them."""
    told: tuple[tuple[int, tuple[int, ...], int], ...] = (
        (1, (7, 5), 12),
        (1, (16, 1), 17),
        (1, (0, 3), 3),
        (1, (4, 4), 8),
        (1, (0, 0), 2),
        (2, (7,), 8),
    )
    with manager_of(context) as manager:
        for sp_size, tokens, rows in told:
            brought = tuple(-(-number // sp_size) for number in tokens for _ in range(sp_size))
            case = Layer(tokens=(brought[0], brought[1]))
            kernel = kernel_of(case, manager, sp_size)
            with step_of(tokens):
                run_and_check(case, kernel, context.rank)
            assert len(kernel.fused_experts.seen[0].rows) == rows
        with step_of(None):
            run_and_check(case, kernel, context.rank)
        assert len(kernel.fused_experts.seen[1].rows) == 2 * case.max_tokens
        batched = Layer(batched=True, max_tokens=65, tokens=(64, 1))
        kernel = kernel_of(batched, manager)
        for told_tokens, rows in (((64, 1), 128), (None, 256)):
            with step_of(told_tokens):
                run_and_check(batched, kernel, context.rank)
            assert kernel.fused_experts.seen[-1].rows.shape[1] == rows


def check_experts_of_deep_gemm_get_counts_by_expert(context: RankContext) -> None:
    """In steps of many rows, but the first one, whose scratch memory must be as large as any.

    With scales that are no powers of two vLLM may choose Triton's experts beside them, which need more scratch memory.
    """
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts

    from ep_a2a.integrations.vllm import prepare_finalize

    with manager_of(context) as manager, replaced(prepare_finalize, "COUNTED_ROWS", 2 * 5):
        for quant in ("per_block_rounded", "per_block"):
            case = Layer(ids="holes", quant=quant, hidden=256)
            kernel = kernel_of(case, manager)
            vars(kernel.fused_experts)["experts"] = object.__new__(DeepGemmExperts)
            kernel.prepare_finalize.post_init_setup(kernel.fused_experts)
            for tokens, counts in (((7, 5), False), ((7, 5), True), ((4, 4), False), ((5, 6), True)):
                kernel.fused_experts.case = case = replace(case, tokens=tokens)
                with step_of(tokens):
                    run_and_check(case, kernel, context.rank)
                found = kernel.fused_experts.seen[-1].expert_tokens_meta
                assert (found is not None) == (counts and quant == "per_block_rounded")
                if found is not None:
                    ids = torch.cat([case.inputs(rank)[2] for rank in range(2)])
                    own = range(*expert_ranges(case.num_experts, 2)[context.rank])
                    want = torch.tensor([int((ids == expert).sum()) for expert in own], dtype=torch.int32)
                    assert torch.equal(found.expert_num_tokens_cpu, want)
                    assert torch.equal(found.expert_num_tokens.cpu(), want)


def check_the_experts_rows_are_sent_from_where_they_lie(context: RankContext) -> None:
    """So nothing would be saved if vLLM asked us for the memory that experts write to."""
    case = Layer()
    with manager_of(context) as manager:
        kernel = kernel_of(case, manager)
        kernels, sent = kernel.prepare_finalize._dispatcher.op.engine, []
        combine = kernels.combine

        def remembered(args: Any, *more: Any) -> None:
            sent.append(args)
            combine(args, *more)

        with replaced(kernels, "combine", remembered):
            run_and_check(case, kernel, context.rank)
        (args,), (seen,) = sent, kernel.fused_experts.seen
        assert args.rows.data_ptr() == seen.output.data_ptr()
        assert not args.copies


def check_too_many_tokens_are_an_error_on_all_ranks(context: RankContext) -> None:
    """Otherwise the ranks with few tokens would wait for the one that has raised."""
    case = Layer(tokens=(17, 2))
    with manager_of(context) as manager:
        kernel = kernel_of(case, manager)
        with step_of(case.tokens), refused(TooManyTokensError, "16", "17"):
            run_kernel(case, kernel, context.rank)
        run_and_check(Layer(), kernel, context.rank)


def check_layers_share_one_op(context: RankContext) -> None:
    """All layers of one shape, one after another, and those of another shape beside them."""
    with manager_of(context) as manager:
        case, wide = Layer(), Layer(hidden=256, seed=2)
        first = kernel_of(case, manager)
        num_bytes = manager.arena.num_bytes
        second = kernel_of(replace(case, seed=1), manager)
        assert first.prepare_finalize._dispatcher.op is second.prepare_finalize._dispatcher.op
        assert manager.arena.num_bytes == num_bytes
        third = kernel_of(wide, manager)
        for kernel in (first, second, third, first):
            own = kernel.fused_experts.case
            run_and_check(own, kernel, context.rank)


def check_layers_built_again_keep_their_op(context: RankContext) -> None:
    """As when weights are reloaded after warm-up: captured graphs hold the op's addresses."""
    case = Layer()
    with manager_of(context) as manager:
        kernel = kernel_of(case, manager)
        op, num_bytes = kernel.prepare_finalize._dispatcher.op, manager.arena.num_bytes
        run_kernel(case, kernel, context.rank)
        manager.end_warm_up(45.0)
        assert op.memory.timeouts.step_secs == 45.0
        del kernel
        again = kernel_of(case, manager)
        assert again.prepare_finalize._dispatcher.op is op
        assert manager.arena.num_bytes == num_bytes
        assert op.memory.timeouts.step_secs == 45.0
        wide = Layer(hidden=256)
        another = kernel_of(wide, manager)
        assert another.prepare_finalize._dispatcher.op.memory.timeouts.step_secs == 45.0
        for built, own in ((again, case), (another, wide)):
            run_and_check(own, built, context.rank)


def check_waits_are_bounded_by_the_groups_timeout_at_first(context: RankContext) -> None:
    with manager_of(context) as manager:
        op = kernel_of(Layer(), manager).prepare_finalize._dispatcher.op
        timeout = context.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        assert op.memory.timeouts.step_secs == timeout > 60
        assert manager.arena.rendezvous.timeout_secs == timeout


def check_ranks_wait_for_the_first_layer_as_long_as_the_group_does(context: RankContext) -> None:
    with manager_of(context) as manager:
        rendezvous = manager.arena.rendezvous
        if context.rank == 1:
            await_others(context, "the end of rank 0's patience")
            return

        def wait_shortly() -> float:
            rendezvous.timeout_secs = 0.5
            return rendezvous.timeout_secs

        with replaced(manager, "_wait_as_the_group_does", wait_shortly), refused(RankTimeoutError, "within 0.5 s"):
            kernel_of(Layer(), manager)
        tell(context, "the end of rank 0's patience")


def check_layers_are_built_whatever_the_default_device_is(context: RankContext) -> None:
    case = Layer()
    with manager_of(context) as manager:
        with torch.device("meta"):
            kernel = kernel_of(case, manager)
        run_and_check(case, kernel, context.rank)


def check_an_error_between_dispatch_and_combine_closes_the_op(context: RankContext) -> None:
    """By what the worker calls after any error; later steps raise instead of waiting."""
    with manager_of(context) as manager:
        kernel = kernel_of(Layer(), manager)
        run_kernel(Layer(), kernel, context.rank)
        manager.close_open_steps()
        run_kernel(Layer(), kernel, context.rank)
        kernel.fused_experts.error = ZeroDivisionError("of the experts")
        with refused(ZeroDivisionError, "of the experts"):
            run_kernel(Layer(), kernel, context.rank)
        manager.close_open_steps()
        kernel.fused_experts.error = None
        for call in (lambda: run_kernel(Layer(), kernel, context.rank), manager.check):
            with refused(ClosedError, "an open op"):
                call()


def check_what_other_ranks_have_found_reaches_tensor_parallel_ranks(context: RankContext) -> None:
    """They gather each other's results, and vLLM looks at the errors of one of them."""
    from ep_a2a.kernels.layout import Region

    case = Layer()
    for tp_size in (1, 2):
        with manager_of(context) as manager:
            manager.tp_group = SimpleNamespace(rank_in_group=0, world_size=tp_size)
            kernel = kernel_of(case, manager)
            run_and_check(case, kernel, context.rank)
            manager.check()
            # as a kernel of the other rank does that gives up when this rank's last one has ended
            kernel.prepare_finalize._dispatcher.op.memory.view(Region.POISON).fill_((1 << 16) + 1)
            if tp_size == 1:
                manager.check()
            else:
                with refused(RankTimeoutError, "no rank is gone or late", f"reported it to rank {context.rank}"):
                    manager.check()


def check_a_rank_that_is_lost_is_told_until_buffers_are_clean(context: RankContext) -> None:
    """As vLLM asks after every step, and before it tries again."""
    case = Layer()
    with manager_of(context, support_fault_tolerance=True) as manager:
        kernel = kernel_of(case, manager)
        run_and_check(case, kernel, context.rank)
        assert (manager.query_active_mask().tolist(), bool(manager.query_fault())) == ([0, 0], False)
        # as where the other rank hangs
        arena = kernel.prepare_finalize._dispatcher.op.arena
        arena.lose((), {1 - context.rank})
        for _ in range(2):
            mask = manager.query_active_mask()
            assert mask.dtype == torch.int32
            assert (mask.tolist(), bool(manager.query_fault())) == ([context.rank, 1 - context.rank], True)
        # as where it has only just died
        with mock.patch.multiple(arena.peers, gone=(), _fallen={1 - context.rank: time.monotonic()}):
            manager.clean_buffers()
        assert (manager.query_active_mask().tolist(), bool(manager.query_fault())) == (mask.tolist(), False)
        manager.clean_buffers()
        assert (manager.query_active_mask().tolist(), bool(manager.query_fault())) == ([0, 0], False)
        run_and_check(case, kernel, context.rank)


def check_experts_with_scratch_memory_learn_how_many_rows_they_see(context: RankContext) -> None:
    """Also within experts that choose between two kinds; a limit that is no size of such memory stays the layer's."""
    from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp8
    from vllm.model_executor.layers.fused_moe.experts.fallback import FallbackExperts

    # what they are told apart by
    assert callable(CutlassExpertsFp8._get_permute_scratch)
    assert {"experts", "fallback_experts"} < set(inspect.signature(FallbackExperts.__init__).parameters)
    case = Layer()
    with manager_of(context) as manager:
        kernel = kernel_of(case, manager)
        layers = kernel.prepare_finalize._moe
        layers.max_num_tokens = case.max_tokens

        def experts(**more: Any) -> SimpleNamespace:
            return SimpleNamespace(moe_config=layers, **more)

        def with_scratch() -> SimpleNamespace:
            return experts(_get_permute_scratch=lambda: None)

        multiplying = experts(_get_permute_scratch=lambda: layers.max_num_tokens * layers.dp_size)
        manager.dp_group = SimpleNamespace(rank_in_group=0, world_size=2)
        kernel.prepare_finalize._raise_row_limit(multiplying)
        assert multiplying.moe_config.max_num_tokens == case.max_tokens
        for each in (with_scratch(), experts(experts=with_scratch(), fallback_experts=experts()), experts()):
            kernel.prepare_finalize._raise_row_limit(each)
            for one in (each, *(vars(each).get(name) for name in ("experts", "fallback_experts"))):
                if hasattr(one, "_get_permute_scratch"):
                    assert one.moe_config.max_num_tokens == 2 * case.max_tokens
                elif one is not None:
                    assert one.moe_config is layers
    assert layers.max_num_tokens == case.max_tokens


def check_a_failure_in_a_stage_reaches_the_next_one(context: RankContext) -> None:
    """Two pipeline stages of a rank each; vLLM's own methods send and receive."""
    with manager_of(context):
        from vllm.distributed.parallel_state import GroupCoordinator

        from ep_a2a.integrations.vllm.stages import link_stages, live_stages
        from ep_a2a.integrations.vllm.worker import _checked
        from ep_a2a.kernels.layout import FailureCode
        from ep_a2a.kernels.primitives import NOBODY

        group = object.__new__(GroupCoordinator)
        vars(group).update(cpu_group=context.group, device_group=context.group, device=context.device, ranks=[0, 1])
        vars(group).update(rank=context.rank, rank_in_group=context.rank, world_size=2, use_cpu_custom_send_recv=False)
        # of the tensor-parallel group, over which vLLM gathers what it can cut
        alone = SimpleNamespace(world_size=1, rank_in_group=0, all_gather=lambda tensor, **_: tensor)
        word, hidden = torch.zeros(1, dtype=torch.int32), torch.arange(24.0).view(3, 8)
        link_stages(group, lambda: [word])
        (stage,) = live_stages
        for failure, error, text in (
            (0, None, ""),
            (FailureCode.TIMEOUT << 16 | 1, RankTimeoutError, "got TIMEOUT, for which rank 1 "),
            (FailureCode.WEIGHTS_MISSING << 16 | NOBODY.value, StateError, "got WEIGHTS_MISSING. "),
        ):
            word.fill_(failure if context.rank == 0 else 0)
            if context.rank == 0:
                for handle in group.isend_tensor_dict({"hidden_states": hidden}, all_gather_group=alone):
                    handle.wait()
                continue
            received, handles, callbacks = group.irecv_tensor_dict(all_gather_group=alone)
            for call in (*(handle.wait for handle in handles), *callbacks):
                call()
            assert list(received) == ["hidden_states"]
            assert torch.equal(received["hidden_states"], hidden)
            with refused(error, text) if error else contextlib.nullcontext():
                stage.check()

        def step(_: Any) -> None:
            if context.rank == 0:
                raise ZeroDivisionError("the model's own")
            group.irecv_tensor_dict(all_gather_group=alone)

        error = (ZeroDivisionError, StateError)[context.rank]
        with refused(error, "the model's own"):
            _checked(step, sends=True)(object())
        if context.rank == 0:
            for handle in stage._handles:
                handle.wait()
            # which nobody waits for
            with refused(error):
                _checked(step, sends=True)(object())
