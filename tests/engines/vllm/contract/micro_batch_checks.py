"""Checks of steps that vLLM splits (dual batch overlap); each runs on both ranks. See micro_batch_cases."""

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ep_a2a.testing import RankContext
from tests.engines.vllm.contract import micro_batch_cases
from tests.engines.vllm.contract.layer_cases import Layer, check_result, manager_of

TOKENS = 11
COMM_SMS = 20
"""vLLM's default of VLLM_DBO_COMM_SMS."""
CASES = [
    Layer(tokens=(TOKENS, TOKENS)),
    Layer(tokens=(TOKENS, TOKENS), seed=1, reduce="Contiguous"),
    Layer(tokens=(TOKENS, TOKENS), seed=2, hidden=256, quant="per_block"),
]


def require_results(model: micro_batch_cases.Model, found: tuple[torch.Tensor, torch.Tensor]) -> int:
    """Those of every layer must be the dense layer's; the number of rows."""
    results, rows = found
    sizes = [case.hidden - case.padding for case in model.cases]
    for case, result in zip(model.cases, results.split(sizes, 1)):
        check_result(case, result, model.manager.rank, rows)
    return len(rows)


def require_streams(model: micro_batch_cases.Model, num_micro_batches: int) -> None:
    """Exchanges run on vLLM's communication stream; everything waits for what it reads, and what it reads stays."""
    assert model.device.late == []
    assert model.device.compute.freed == []
    assert not model.device.compute.read, "the compute stream has waited for each of them"
    assert len(model.device.works) == 4 * len(model.cases) * num_micro_batches
    for (kind, *_), stream in model.device.works:
        assert stream == (
            micro_batch_cases.COMM if kind in micro_batch_cases.EXCHANGES else micro_batch_cases.COMPUTE
        ), kind


def in_micro_batches(context: RankContext, number: int, sp_size: int = 1, **changes: Any) -> None:
    """Split steps, whole ones, and steps that a graph captures, by each of vLLM's model runners."""
    with manager_of(context, number) as manager, micro_batch_cases.on_stub_streams(manager) as device:
        model = micro_batch_cases.Model([replace(case, **changes) for case in CASES], manager, device, sp_size)
        ops = [each.op for each in model.kernels[0].prepare_finalize._dispatchers]
        most = [op.config.max_num_inp_token_per_rank for op in ops]
        assert most == [16, *[16 // number + number - 1] * (number - 1)]
        assert [op.index for op in ops] == list(range(number))
        for run in micro_batch_cases.runners(model, number):
            for options in run.forms:
                device.begin_step()
                model.bounds.clear()
                num_rows = require_results(model, run(TOKENS, **options))
                if options.get("whole"):
                    assert num_rows == -(-TOKENS // sp_size)
                    assert {stream for _, stream in device.works} == {micro_batch_cases.COMPUTE}
                    assert set(model.bounds) <= {0, micro_batch_cases.NUM_SMS}
                else:
                    assert num_rows == TOKENS if sp_size == 1 else TOKENS // sp_size <= num_rows < TOKENS
                    require_streams(model, number)
                    assert set(model.bounds) == {COMM_SMS}


def check_steps_of_two_micro_batches(context: RankContext) -> None:
    in_micro_batches(context, 2)


def check_steps_of_three_micro_batches(context: RankContext) -> None:
    """Of experts that drop the columns of padding."""
    in_micro_batches(context, 3, padding=48, has_unpadded_output=True, skip_forward_padding=True)


def check_sequence_parallel_micro_batches(context: RankContext) -> None:
    in_micro_batches(context, 2, sp_size=2)


def require_failure(run: Callable[..., Any], error: Exception) -> None:
    """A step must raise this error, itself or as a cause, and leave no thread behind."""
    found: BaseException | None = None
    before = threading.active_count()
    try:
        run(TOKENS)
    except Exception as raised:  # noqa: BLE001 - compared below
        found = raised
    assert error in (found, found and found.__cause__), found
    assert threading.active_count() == before


FAILURES = ((2, (0, 0)), (2, (1, 2)), (3, (1, 1)))
"""Numbers of micro-batches, and the micro-batch and layer that fail: at once; when the others have done nearly all."""


def check_a_failure_in_one_micro_batch_ends_the_step(context: RankContext) -> None:
    threading.excepthook = lambda _: None
    for number, failing in FAILURES:
        # an op that has been closed serves no other runner
        for kind in (micro_batch_cases.FirstRunner, micro_batch_cases.SecondRunner):
            with manager_of(context, number) as manager, micro_batch_cases.on_stub_streams(manager) as device:
                model = micro_batch_cases.Model(CASES, manager, device)
                for run in micro_batch_cases.runners(model, number):
                    if isinstance(run, kind):
                        model.failing = failing
                        require_failure(run, model.error)


def check_a_failure_of_our_call_ends_the_step(context: RankContext) -> None:
    threading.excepthook = lambda _: None
    for call in ("dispatch", "combine"):
        with manager_of(context, 2) as manager, micro_batch_cases.on_stub_streams(manager) as device:
            model = micro_batch_cases.Model(CASES, manager, device)
            error = TimeoutError("a rank did not come")

            def fail(*_: Any, error: Exception = error, **__: Any) -> None:
                raise error

            setattr(model.kernels[1].prepare_finalize._dispatchers[0], call, fail)
            require_failure(micro_batch_cases.runners(model)[0], error)
            # the step of the other micro-batch, which has been left open
            manager.close_open_steps()


class MetadataBuilder:
    """As FlashAttention's: it can give metadata another block table."""

    def __init__(self) -> None:
        self.supports_update_block_table = True

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:
        return common_attn_metadata

    def update_block_table(self, metadata: Any, block_table: Any, slot_mapping: Any) -> Any:
        return replace(metadata, block_table_tensor=block_table, slot_mapping=slot_mapping)


def check_each_micro_batch_has_the_lengths_of_its_own_requests(_: RankContext) -> None:
    """By the method of vLLM's first model runner that splits attention metadata."""
    import numpy as np
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices
    from vllm.v1.worker.utils import AttentionGroup

    from ep_a2a.integrations.vllm.micro_batches import patch_micro_batches

    patch_micro_batches()
    lengths = np.array([3, 4, 5, 6, 2], dtype=np.int32)
    starts = torch.tensor([0, *lengths.cumsum()], dtype=torch.int32)
    padded = torch.tensor(lengths)
    num_reqs, num_tokens = len(lengths), int(starts[-1])
    builders = [MetadataBuilder(), MetadataBuilder()]
    group = AttentionGroup(None, ["attention"], None, 0)
    group.metadata_builders = builders
    table = mock.Mock(get_device_tensor=lambda _: torch.arange(num_reqs)[:, None])
    runner = mock.MagicMock(
        attn_groups=[[group]],
        optimistic_seq_lens_cpu=padded,
        seq_lens=padded,
        query_start_loc=SimpleNamespace(gpu=starts, cpu=starts),
        input_batch=mock.Mock(
            block_table=[table],
            num_computed_tokens_cpu_tensor=torch.zeros(num_reqs, dtype=torch.int32),
            num_prompt_tokens_cpu_tensor=padded,
        ),
        positions=torch.arange(num_tokens),
        dcp_world_size=1,
        pcp_world_size=1,
        cache_config=mock.Mock(kv_sharing_fast_prefill=False, use_replayssm=False),
        speculative_config=None,
        is_mm_prefix_lm=False,
        use_async_spec_decode=False,
        routed_experts_initialized=False,
        model_config=SimpleNamespace(rswa_window=None),
    )
    runner.kv_cache_config.kv_cache_groups = [mock.Mock(kv_cache_spec=object())]
    runner._get_encoder_seq_lens.return_value = (None, None)
    slices, _ = maybe_create_ubatch_slices(True, lengths, num_tokens, num_reqs, 2)
    split, _ = GPUModelRunner._build_attention_metadata(
        runner,
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_query_len=6,
        ubatch_slices=slices,
        slot_mappings={0: torch.arange(num_tokens)},
    )
    found = [step["attention"].query_start_loc.diff().tolist() for step in split]
    assert found == [[3, 4, 3], [2, 6, 2]]
    assert [len(step["attention"].block_table_tensor) for step in split] == [3, 3]
