"""Programs written for MORI, as rank bodies: they say `import mori` and get ep_a2a.compat.mori by install().

On CPU (tests/multiprocess) and on GPUs (tests/multigpu) alike. What a program written for MORI would not say is marked.
"""

import contextlib
import ctypes
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ep_a2a import errors
from ep_a2a.compat.mori import install, uninstall
from ep_a2a.memory.guards import recording_on_cpu
from ep_a2a.routing import num_distinct_ranks
from ep_a2a.testing import RankContext

GROUP_NAME = "default"
NUM_TOKENS = (5, 3, 0, 4)
MAX_TOKENS, HIDDEN_DIM, TOPK, EXPERTS_PER_RANK = 8, 64, 2, 3
SITUATIONS = range(7)
"""Seeds. From the third on only rank 0 receives rows. With each, another rank has few tokens or none; with the last,
none has any."""


@contextlib.contextmanager
def mori_world(context: RankContext) -> Iterator[Any]:
    """`import mori` and its world, as the beginning and the end of a program."""
    install()
    import mori

    torch._C._distributed_c10d._register_process_group(GROUP_NAME, context.group)
    # not MORI's: on a machine with GPUs a test on CPU must say so
    device = {"device": "cpu"} if context.device.type == "cpu" else {}
    mori.shmem.shmem_torch_process_group_init(GROUP_NAME, **device)
    try:
        yield mori
    finally:
        mori.shmem.shmem_finalize()
        torch._C._distributed_c10d._unregister_process_group(GROUP_NAME)
        uninstall()


def make_config(mori: Any, context: RankContext, **changes: Any) -> Any:
    """As SGLang does: of the fields that it would like to set, those that this MORI has."""
    wanted = {
        "data_type": torch.bfloat16,
        "rank": context.rank,
        "world_size": context.world_size,
        "hidden_dim": HIDDEN_DIM,
        "scale_dim": 0,
        "scale_type_size": 1,
        "max_token_type_size": 4,
        "max_num_inp_token_per_rank": MAX_TOKENS,
        "num_experts_per_rank": EXPERTS_PER_RANK,
        "num_experts_per_token": TOPK,
        "warp_num_per_block": 8,
        "block_num": 80,
        "num_qp_per_pe": 2,
        "a_field_of_tomorrow": True,
    } | changes
    known = {field.name for field in dataclasses.fields(mori.ops.EpDispatchCombineConfig)}
    return mori.ops.EpDispatchCombineConfig(**{name: value for name, value in wanted.items() if name in known})


def tokens_of(rank: int, world_size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens [T, H], weights [T, K], ids [T, K]) of any rank, on CPU; every rank can make those of all."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    num_tokens = NUM_TOKENS[(rank + seed) % len(NUM_TOKENS)] if seed < SITUATIONS[-1] else 0
    tokens = torch.randn(num_tokens, HIDDEN_DIM, generator=generator).bfloat16()
    weights = torch.rand(num_tokens, TOPK, generator=generator)
    num_experts = EXPERTS_PER_RANK * (world_size if seed < 3 else 1)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :TOPK]
    return tokens, weights, ids.int().contiguous()


def own_tokens(context: RankContext, seed: int = 0) -> list[torch.Tensor]:
    return [each.to(context.device) for each in tokens_of(context.rank, context.world_size, seed)]


def expected_sums(tokens: torch.Tensor, ids: torch.Tensor, world_size: int) -> torch.Tensor:
    """Identity experts: every token times the number of distinct ranks it went to."""
    num_ranks = num_distinct_ranks(ids, EXPERTS_PER_RANK * world_size, world_size)[:, None]
    return (tokens.float() * num_ranks).bfloat16()


def check_combined(
    context: RankContext, tokens: torch.Tensor, ids: torch.Tensor, got: Any, weights: torch.Tensor | None = None
) -> None:
    """Results of identity experts and, where weights were combined, their sums."""
    combined, sums = got if isinstance(got, tuple) else (got, None)
    assert torch.equal(combined[: len(ids)].cpu(), expected_sums(tokens.cpu(), ids.cpu(), context.world_size))
    if weights is not None:
        num_ranks = num_distinct_ranks(ids, EXPERTS_PER_RANK * context.world_size, context.world_size)[:, None]
        torch.testing.assert_close(sums[: len(ids)], weights * num_ranks)


def check_received(context: RankContext, op: Any, got: Any, seed: int = 0) -> int:
    """Rows, weights and ids are those of the tokens that the positions name; each token has come once. How many."""
    rows, weights, _, ids, total = got
    num_received = int(total)
    everyone = [tokens_of(rank, context.world_size, seed) for rank in range(context.world_size)]
    positions = [op.decode_send_flat_idx(flat) for flat in op.get_dispatch_src_token_pos()]
    first, last = EXPERTS_PER_RANK * context.rank, EXPERTS_PER_RANK * (context.rank + 1)
    wanted = [
        (rank, token)
        for rank, (_, _, each) in enumerate(everyone)
        for token in range(len(each))
        if ((each[token] >= first) & (each[token] < last)).any()
    ]
    assert positions == wanted
    for row, (rank, token) in enumerate(positions):
        for got_one, sent in zip((rows, weights, ids), everyone[rank]):
            assert torch.equal(got_one[row].cpu(), sent[token])
    assert rows.shape[0] == weights.shape[0] == ids.shape[0] == op.max_num_tokens_to_recv()
    assert num_received == len(wanted)
    return num_received


def complete_program(context: RankContext) -> None:
    """MORI's example: one op, dispatch, experts that return what they get, combine; and MORI's way to check it."""
    with mori_world(context) as mori:
        assert (mori.shmem.shmem_mype(), mori.shmem.shmem_npes()) == (context.rank, context.world_size)
        config = make_config(
            mori, context, use_external_inp_buf=False, kernel_type=mori.ops.EpDispatchCombineKernelType.IntraNode
        )
        op = mori.ops.EpDispatchCombineOp(config)
        for seed in SITUATIONS:
            tokens, weights, ids = own_tokens(context, seed)
            got = op.dispatch(tokens, weights, None, ids, block_num=80, warp_per_block=8, call_local_expert_count=True)
            num_received = check_received(context, op, got, seed)
            received, received_weights, scales, received_ids, _ = got
            assert scales is None
            local = received_ids[:num_received].flatten().cpu() - EXPERTS_PER_RANK * context.rank
            counts = [int((local == expert).sum()) for expert in range(EXPERTS_PER_RANK)]
            assert op.local_expert_count.tolist() == counts
            rows = op.get_registered_combine_input_buffer(config.data_type)
            rows[:num_received].copy_(received[:num_received])
            # the registered buffer is read, whatever else is passed
            ignored = torch.full_like(received, torch.nan)
            back = op.combine(ignored, received_weights, ids, block_num=80, warp_per_block=8, call_reset=False)
            assert back[0].shape == (op.max_num_tokens_to_send_per_rank(), HIDDEN_DIM)
            check_combined(context, tokens, ids, back, weights)
        op.reset()
        assert op.max_num_tokens_to_send() == op.max_num_tokens_to_recv() == context.world_size * MAX_TOKENS
        assert op.get_launch_config(is_dispatch=False)[0] > 0


def halves(context: RankContext, kernel_type: str) -> None:
    """As ATOM with low latency: the sending halves give the tensors, the receiving ones fill them."""
    with mori_world(context) as mori:
        config = make_config(mori, context, kernel_type=getattr(mori.ops.EpDispatchCombineKernelType, kernel_type))
        op = mori.ops.EpDispatchCombineOp(config)
        for seed in SITUATIONS:
            tokens, weights, ids = own_tokens(context, seed)
            got = op.dispatch_send(tokens, weights, torch.empty(0) if seed % 2 else None, ids)
            with pytest.raises(errors.AlternationError):
                op.combine(got[0], None, ids)
            assert op.dispatch_recv(call_local_expert_count=True) is None
            num_received = check_received(context, op, got, seed)
            local = got[3][:num_received].flatten().cpu() - EXPERTS_PER_RANK * context.rank
            assert op.local_expert_count.tolist() == [int((local == one).sum()) for one in range(EXPERTS_PER_RANK)]
            rows, row_weights = got[0][:num_received].clone(), got[1][:num_received].clone() if seed % 2 else None
            combined, sums = op.combine_send(rows, row_weights, ids)
            rows.fill_(torch.nan)
            assert op.combine_recv() is None
            assert (sums is None) == (row_weights is None)
            check_combined(context, tokens, ids, (combined, sums), weights if seed % 2 else None)


def rows_are_missing(context: RankContext) -> None:
    """Rows cut to fewer than were received, as to this rank's T: an error, after which the right call works."""
    with mori_world(context) as mori:
        op = mori.ops.EpDispatchCombineOp(make_config(mori, context))
        # every rank receives rows, more than one
        tokens, weights, ids = (torch.cat([each, each]) for each in tokens_of(0, context.world_size))
        tokens, weights, ids = (each[:MAX_TOKENS].to(context.device) for each in (tokens, weights, ids))
        for shorter_by in (1, 4):
            received, received_weights, _, received_ids, total = op.dispatch(tokens, weights, None, ids)
            cut = int(total) - shorter_by
            missing = pytest.raises(errors.InputError, match=f"{shorter_by} rows fewer")
            if context.device.type == "cuda":
                op.combine(received[:cut], None, ids)
                _settle(context, mori)
                with missing:
                    op.dispatch(tokens, weights, None, ids)
                op.reset()
                received = op.dispatch(tokens, weights, None, ids)[0]
            else:
                op.reset()  # nothing is wrong, so the step goes on
                with missing:
                    op.combine(received[:cut], received_weights[:cut], received_ids[:cut])
                with pytest.raises(errors.InputError, match="rows fewer"):
                    op.combine(received[:1], weights[:1], ids)
            check_combined(context, tokens, ids, op.combine(received[: cut + shorter_by], None, ids))


def fewer_rows_than_received_buffer(context: RankContext, kernel_type: str, gpu_per_node: int) -> None:
    """Rows and weights in all forms, also cut as ATOM does: rows that no rank can have sent; also on virtual nodes."""
    with mori_world(context) as mori:
        chosen = getattr(mori.ops.EpDispatchCombineKernelType, kernel_type)
        op = mori.ops.EpDispatchCombineOp(
            make_config(mori, context, kernel_type=chosen, gpu_per_node=gpu_per_node, block_num=32)
        )
        assert op.config.kernel_type is chosen
        assert op.native.config.kernel_type.name == kernel_type
        forms = itertools.product(("all", "cut", "but one", "registered"), ("none", "own", "received", "copied"))
        # each form in two situations
        for number, (rows, given) in enumerate([*forms] * 2):
            tokens, weights, ids = own_tokens(context, number % len(SITUATIONS))
            # ATOM's way to call it: the sixth argument is meant for another parameter, and harmless
            received, received_weights, _, _, total = op.dispatch(tokens, weights, None, ids, 64, 4)
            most = {"cut": int(total), "but one": max(int(total), 1)}.get(rows)
            if rows == "registered":
                op.get_registered_combine_input_buffer(torch.bfloat16).copy_(received)
            received_weights = received_weights[:most]
            back = op.combine(
                received[:most].clone(),
                {"own": weights, "received": received_weights, "copied": received_weights.clone()}.get(given),
                ids,
                64,
                4,
                use_external_inp_buf=int(rows != "registered"),
            )
            check_combined(context, tokens, ids, back, weights if given in ("received", "copied") else None)
        assert len(op.get_dispatch_src_token_pos()) <= len(received)


def a_dtype_per_call(context: RankContext) -> None:
    """Tokens of other dtypes than the config's, in turn; the first call of each makes an op with all ranks."""
    with mori_world(context) as mori:
        op = mori.ops.EpDispatchCombineOp(make_config(mori, context, use_external_inp_buf=False))
        # as programs do that ask once, before the first step
        buffer = op.get_registered_combine_input_buffer(torch.bfloat16)
        tokens, weights, ids = own_tokens(context)
        with pytest.raises(errors.ConfigMismatchError):
            op.dispatch(tokens.to(torch.float16 if context.rank else torch.float32), weights, None, ids)
        made = {}
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float8_e4m3fn):
            received = op.dispatch(tokens.to(dtype), weights, None, ids)[0]
            assert received.dtype == dtype
            assert made.setdefault(dtype, op.native) is op.native
            with pytest.raises(errors.AlternationError, match="combine"):
                op.dispatch(tokens.half(), weights, None, ids)
            _combine_of_dtype(context, op, buffer, received, tokens, ids)
        assert len(made) == 3
        with pytest.raises(errors.DtypeError):
            op.dispatch(tokens.double(), weights, None, ids)
        if context.device.type == "cpu":
            with recording_on_cpu(), pytest.raises(errors.UnsupportedError, match="before the capture"):
                op.dispatch(tokens.half(), weights, None, ids)
        _errors_reach_other_dtypes(context, mori, op)
        _an_error_leaves_an_open_send(context, mori, op, idle=made[torch.float32])
        op.close()
        assert all(each.closed for each in made.values())
        with pytest.raises(errors.ClosedError):
            op.dispatch(tokens.half(), weights, None, ids)


def _combine_of_dtype(
    context: RankContext, op: Any, buffer: torch.Tensor, received: torch.Tensor, tokens: torch.Tensor, ids: torch.Tensor
) -> None:
    """Identity experts, whose rows combine reads from `buffer` where it has the dtype."""
    if received.dtype == torch.float32:
        with pytest.raises(errors.DtypeError, match="registered buffer of torch"):
            op.combine(received, None, ids)
        sums = op.combine(received, None, ids, use_external_inp_buf=1)[0]
    else:
        assert op.get_registered_combine_input_buffer(torch.bfloat16).data_ptr() == buffer.data_ptr()
        buffer.copy_(received)
        sums = op.combine(torch.full_like(buffer, torch.nan), None, ids)[0]
    num_ranks = num_distinct_ranks(ids.cpu(), EXPERTS_PER_RANK * context.world_size, context.world_size)[:, None]
    expected = tokens.to(received.dtype).float().cpu() * num_ranks
    assert torch.equal(sums[: len(ids)].cpu(), expected.to(sums.dtype))


def _combine_other_ids(context: RankContext, mori: Any, op: Any, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """A combine that records ForeignIndicesError on ranks with tokens."""
    op.combine(rows, None, (ids + 1) % (EXPERTS_PER_RANK * context.world_size), use_external_inp_buf=1)
    _settle(context, mori)


def _settle(context: RankContext, mori: Any) -> None:
    """All ranks have recorded the errors of earlier calls."""
    if context.device.type == "cuda":
        torch.cuda.synchronize()
    mori.shmem.shmem_barrier_all()


def _errors_reach_other_dtypes(context: RankContext, mori: Any, op: Any) -> None:
    """The next dispatch raises what a step of another dtype has recorded, also inside of the step."""
    tokens, weights, ids = own_tokens(context)
    op.dispatch(tokens, None if context.rank else weights, None, ids)
    _settle(context, mori)
    with pytest.raises(errors.ConfigMismatchError):
        op.dispatch(tokens.float(), weights, None, ids)
    op.reset()
    _combine_other_ids(context, mori, op, op.dispatch(tokens, weights, None, ids)[0], ids)
    if len(ids):
        with pytest.raises(errors.ForeignIndicesError):
            op.dispatch(tokens.float(), weights, None, ids)
    op.reset()
    op._combine_input.lost_rows._on_host.fill_(2)  # as once a GPU's copy has arrived
    with pytest.raises(errors.InputError, match="2 rows fewer"):
        op.dispatch(tokens.float(), weights, None, ids)
    op.reset()


def _an_error_leaves_an_open_send(context: RankContext, mori: Any, op: Any, idle: Any) -> None:
    """A reset for the error of a dtype that is not in use."""
    tokens, weights, ids = own_tokens(context)
    rows = op.dispatch_send(tokens, weights, None, ids)[0]
    _combine_other_ids(context, mori, idle, idle.dispatch(tokens.float(), weights, None, ids)[0], ids)
    op.reset()
    op.local_expert_count.fill_(-1)
    op.dispatch_recv(call_local_expert_count=True)
    assert (op.local_expert_count >= 0).all()
    check_combined(context, tokens, ids, op.combine(rows, None, ids, use_external_inp_buf=1))


def what_is_refused(context: RankContext) -> None:
    """What corrupts sums in MORI, or is not here: errors that say what to do, after which the op goes on."""
    with mori_world(context) as mori:
        with pytest.raises(errors.StateError, match="shmem_finalize"):
            mori.shmem.shmem_torch_process_group_init(GROUP_NAME)
        op = mori.ops.EpDispatchCombineOp(make_config(mori, context))
        tokens, weights, ids = own_tokens(context)
        received, received_weights, _, received_ids, _ = op.dispatch(tokens, weights, None, ids)
        with pytest.raises(errors.InputError, match="not this rank's own topk_weights"):
            op.combine(received, received_weights[: len(received) - 1].clone(), ids)
        with pytest.raises(errors.ForeignIndicesError, match="own topk_ids"):
            op.combine(received, received_weights, received_ids[: len(received) - 1].clone())
        check_combined(context, tokens, ids, op.combine(received, None, ids))


def addresses(context: RankContext) -> None:
    """Symmetric memory by address: on CPU this rank finds in its own what all have written to each other's."""
    with mori_world(context) as mori:
        shmem = mori.shmem
        start, size = shmem.shmem_malloc(256), 16
        other = shmem.shmem_malloc_align(128, 64)
        assert other % 128 == 0
        for peer in range(context.world_size):
            target = shmem.shmem_ptr_p2p(start + size * context.rank, context.rank, peer)
            if context.device.type == "cpu":
                ctypes.memset(target, 1 + context.rank, size)
        shmem.shmem_barrier_all()
        if context.device.type == "cpu":
            found = [ctypes.string_at(start + size * rank, size)[-1] for rank in range(context.world_size)]
            assert found == list(range(1, context.world_size + 1))
        assert shmem.shmem_ptr_p2p(start, context.rank, context.rank) == start
        assert shmem.shmem_ptr_p2p(1, context.rank, 0) == 0
        tensor = shmem.mori_shmem_create_tensor((4, 8), torch.float32)
        assert (tensor.shape, tensor.dtype, bool(tensor.any())) == ((4, 8), torch.float32, False)
        assert shmem.symm_mori_shmem_tensor(tensor, context.rank) is tensor
        shmem.shmem_barrier_all()
        shmem.mori_shmem_free_tensor(tensor)
        shmem.shmem_free(start)
        for call in (
            lambda: shmem.shmem_free(start),
            lambda: shmem.shmem_free(other + 1),
            lambda: shmem.shmem_ptr_p2p(other, context.rank + 1, 0),
            lambda: shmem.shmem_malloc_align(3, 64),
        ):
            with pytest.raises(errors.InputError):
                call()
