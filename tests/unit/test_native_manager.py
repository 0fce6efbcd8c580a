"""The ep_a2a backend's manager and its op, alone in a group: what is compared, dropped, recorded and raised."""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ep_a2a import errors
from ep_a2a.config import FP8_DTYPE
from ep_a2a.kernels.layout import Region
from ep_a2a.managers.native import NativeAll2AllManager
from ep_a2a.managers.registry import create_manager
from ep_a2a.ops.inputs import travelling_scales
from ep_a2a.ops.op import EpDispatchCombineOp
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case

HIDDEN, TOPK = 128, 2
TOKENS, WEIGHTS = torch.ones(3, HIDDEN, dtype=torch.bfloat16), torch.ones(3, TOPK)
IDS = torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32)
ROWS = torch.ones(8, HIDDEN, dtype=torch.bfloat16)
KWARGS = kwargs_of(Case(1, HIDDEN, TOPK, num_experts=4, max_tokens=8), 0)


@pytest.fixture
def manager(group):
    with NativeAll2AllManager(group) as manager:
        manager.device = "cpu"
        yield manager


@pytest.mark.parametrize("slot", range(TOPK))
def test_foreign_ids_are_noticed_in_every_slot(manager, slot):
    op = manager.get_handle(KWARGS)
    rows, *_ = op.dispatch(TOKENS, WEIGHTS, None, IDS)
    foreign = IDS.clone()
    foreign[1, slot] += 4
    op.combine(rows, None, foreign)
    with pytest.raises(errors.ForeignIndicesError):
        op.check()


def test_ids_beyond_32_bits_are_dropped(manager):
    op = manager.get_handle(KWARGS)
    # the first token names expert 1, and the lower halves of the others' ids are experts, too
    ids = torch.tensor([[1, 2**32 + 1], [2**32, 2**33 + 2], [-(2**32), 2**31]])
    rows, *_ = manager.dispatch(TOKENS, WEIGHTS, ids)
    assert rows.shape == (1, op.config.hidden_dim)
    assert torch.equal(manager.combine(rows), torch.tensor([[1.0], [0.0], [0.0]]).expand(3, HIDDEN).to(torch.bfloat16))


def test_the_tag_of_every_call_is_checked(manager):
    """Not only that of the first call with tensors of these shapes."""
    op = manager.get_handle(KWARGS)
    for tag in (0, 3):
        op.dispatch(TOKENS, WEIGHTS, None, IDS, tag=tag)
        op.combine(ROWS, None, IDS)
        for wrong in (-1, 2**40, 1.5, True):
            with pytest.raises(errors.InputError, match="tag"):
                op.dispatch(TOKENS, WEIGHTS, None, IDS, tag=wrong)


def test_a_dispatch_that_fails_raises_at_once(manager, monkeypatch):
    op = manager.get_handle(KWARGS)
    dispatch, failure = type(op).dispatch, errors.RankTimeoutError("a rank", "none")

    def fail(self: EpDispatchCombineOp, *args: Any, **kwargs: Any) -> Any:
        found = dispatch(self, *args, **kwargs)
        monkeypatch.setattr(EpDispatchCombineOp, "check", lambda _: raise_(failure))
        return found

    monkeypatch.setattr(EpDispatchCombineOp, "dispatch", fail)
    with pytest.raises(errors.RankTimeoutError) as caught:
        manager.dispatch(TOKENS, WEIGHTS, torch.zeros(3, TOPK, dtype=torch.int64))
    assert caught.value is failure


def raise_(error: Exception) -> None:
    raise error


def test_copies_of_a_split_dispatch_belong_to_the_stream_that_reads_them(monkeypatch):
    """Else torch gives their memory to the next work of the stream on which dispatch_send ran."""
    recorded: list[Any] = []
    copy = SimpleNamespace(record_stream=recorded.append)
    engine = SimpleNamespace(recv_reads_inputs=True, dispatch=lambda *_: None)
    op = SimpleNamespace(engine=engine, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    step = SimpleNamespace(inputs=[copy, copy], forget_inputs=lambda: None)
    EpDispatchCombineOp._finish_dispatch(op, step)  # type: ignore[arg-type]
    assert recorded == ["stream of cuda"] * 2


def test_an_output_of_another_shape_is_refused(manager):
    """One row would be written to all of its rows."""
    op = manager.get_handle(KWARGS)
    rows, *_ = manager.dispatch(TOKENS, WEIGHTS, IDS)
    for shape in ((1, HIDDEN), (3, 1), (4, HIDDEN)):
        with pytest.raises(errors.ShapeError):
            manager.combine_into_output(rows, torch.empty(shape))
    assert torch.equal(manager.combine_into_output(rows, torch.empty(3, HIDDEN)), TOKENS.float())
    assert not op.has_open_step


def calls_until(op: EpDispatchCombineOp, name: str) -> dict[str, Callable[[], Any]]:
    """The two calls of a step by name; those before `name` are made."""
    calls = {
        "dispatch": lambda: op.dispatch(TOKENS, WEIGHTS, None, IDS),
        "combine": lambda: op.combine(ROWS, None, IDS),
    }
    if name == "combine":
        calls["dispatch"]()
    return calls


@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_an_interrupted_call_leaves_a_torn_step(manager, monkeypatch, name):
    op = manager.get_handle(KWARGS)
    calls = calls_until(op, name)
    with monkeypatch.context() as patched:
        patched.setattr(op.engine, name, lambda *_: raise_(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            calls[name]()
    assert op.has_open_step
    for call in calls.values():
        with pytest.raises(errors.StateError, match=f"a {name} that Ctrl-C or an exception has interrupted"):
            call()
    op.reset()
    calls["dispatch"]()
    calls["combine"]()


@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_a_second_thread_in_a_call_is_named(manager, monkeypatch, name):
    op = manager.get_handle(KWARGS)
    calls = calls_until(op, name)
    is_inside, goes_on = threading.Event(), threading.Event()
    run = getattr(op.engine, name)

    def wait_inside(*args: Any) -> None:
        is_inside.set()
        goes_on.wait()
        run(*args)

    monkeypatch.setattr(op.engine, name, wait_inside)
    first = threading.Thread(target=calls[name], name="the first")
    first.start()
    is_inside.wait()
    try:
        for call in calls.values():
            with pytest.raises(errors.StateError, match=f"a {name} that thread 'the first' is in"):
                call()
    finally:
        goes_on.set()
        first.join()
    calls["combine" if name == "dispatch" else "dispatch"]()
    assert op.has_open_step == (name == "combine")


UNREADABLE: tuple[tuple[type[errors.InputError], str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (errors.InputError, r"{name}\.resolve_neg", lambda tensor: torch._neg_view(-tensor)),
    (errors.ContiguityError, "{name} to be contiguous", lambda tensor: torch.stack([tensor, tensor], -1)[..., 0]),
    (errors.DeviceError, "{name} on cpu; got meta", lambda tensor: tensor.to("meta")),
)


def test_tensors_that_kernels_cannot_read_are_refused(manager):
    """The good calls before fill the caches of checks, and those behind give what they give without the bad ones."""
    op = manager.get_handle(KWARGS)

    def refuse(call: Callable[..., Any], arguments: dict[str, torch.Tensor], **others: Any) -> None:
        for name in arguments:
            for kind, text, change in UNREADABLE:
                with pytest.raises(kind, match=text.format(name=name)):
                    call(**arguments | {name: change(arguments[name])}, **others)

    for factor in (1, 2):
        given = {"input": factor * TOKENS, "weights": factor * WEIGHTS, "indices": IDS}
        if factor == 2:
            refuse(op.dispatch, given, scales=None)
        rows, weights, *_ = op.dispatch(**given, scales=None)
        back = {"input": rows, "weights": weights, "indices": IDS, "out": TOKENS.clone(), "bias_0": TOKENS}
        if factor == 2:
            refuse(op.combine, back)
        result, sums = op.combine(**back)
        assert torch.equal(result, factor * TOKENS + TOKENS)
        assert sums is not None
        assert torch.equal(sums[:3], factor * WEIGHTS)


def _behind(num_elements: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.new_zeros(num_elements + tensor.numel())[num_elements:].view(tensor.shape)


PLACES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda tensor: tensor.new_zeros(len(tensor), tensor.shape[1] + 1)[:, :-1],
    lambda tensor: tensor.new_zeros(len(tensor), 2 * tensor.shape[1])[:, ::2],
    lambda tensor: tensor.new_zeros(2 * len(tensor), tensor.shape[1])[::2],
    lambda tensor: tensor.new_zeros(tensor.shape[::-1]).T,
    *map(_behind, (1, 3, 16)),
)
"""Where a tensor of this shape may lie: views of larger ones, and behind other elements of the same memory."""


@pytest.mark.parametrize("num_tokens", [3, 1, 0])
@pytest.mark.parametrize("scale_dim", [4, 5])
def test_tensors_may_lie_anywhere_or_are_refused(manager, num_tokens, scale_dim):
    """A lone row is contiguous whatever its stride, which torch looks at even so."""
    op = manager.get_handle({**KWARGS, "scale_dim": scale_dim, "scale_type_size": 1})
    scales = torch.arange(num_tokens * scale_dim, dtype=torch.uint8).view(-1, scale_dim)
    given = {"input": TOKENS, "weights": WEIGHTS, "indices": IDS}
    given = {name: each[:num_tokens] for name, each in given.items()} | {"scales": scales}
    expected = [each.clone() for each in op.dispatch(**given)]
    rows = ROWS[: len(expected[0])]
    back = {"input": rows, "weights": expected[1], "indices": given["indices"], "bias_0": given["input"]}
    sums = op.combine(**back)[0].clone()

    def elsewhere(call: Callable[..., Any], given: dict[str, torch.Tensor]) -> Iterator[Any]:
        """What the call returns with each tensor in each place, unless it must refuse it."""
        for name, tensor in given.items():
            for place in PLACES:
                lain = place(tensor).copy_(tensor)
                alignment = {"input": 16, "bias_0": 16, "out": 16, "scales": 1 if scale_dim == 5 else 4}.get(name, 1)
                if lain.is_contiguous() and (lain.data_ptr() % alignment == 0 or not lain.numel()):
                    yield call(**given | {name: lain})
                else:
                    with pytest.raises(errors.ContiguityError, match=f"expected {name} "):
                        call(**given | {name: lain})

    for found in elsewhere(op.dispatch, given):
        assert all(map(torch.equal, found, expected))
        op.combine(rows, None, None)
    op.dispatch(**given)
    for found in elsewhere(op.combine, back | {"out": torch.empty_like(given["input"])}):
        assert torch.equal(found[0][:num_tokens], sums[:num_tokens])
        op.dispatch(**given)


def test_collectives_send_the_values_of_lazily_negated_tensors(manager):
    naive = create_manager("naive", dist.group.WORLD)
    naive.device = "cpu"
    hidden, _ = naive.dispatch(torch._neg_view(TOKENS), torch.ones(3, 4))[:2]
    assert torch.equal(hidden, -TOKENS)
    naive.destroy()


@pytest.mark.parametrize("index", [-1, "0", 1.5, True, None, [], torch.tensor(1.0)])
def test_an_index_that_is_no_number_of_an_op_is_refused(manager, index):
    config = manager.get_handle(KWARGS).config
    with create_manager("naive", dist.group.WORLD) as naive:
        calls = [functools.partial(each.get_handle, KWARGS, index) for each in (manager, naive)]
        if index is not None:
            calls.append(functools.partial(EpDispatchCombineOp, config, arena=manager.arena, index=index))
        for call in calls:
            with pytest.raises(errors.ConfigError, match="index to be an integer >= 0"):
                call()
    assert manager.get_handle(KWARGS, np.int64(1)) is manager.get_handle(KWARGS, 1)


def test_an_index_that_the_arena_has_handed_out_is_taken(manager):
    arena, config = manager.arena, manager.get_handle(KWARGS).config
    index = arena.unshared_index()
    with EpDispatchCombineOp(config, arena=arena, index=index) as op:
        assert op.index == index
    with pytest.raises(errors.ConfigError, match="index"):
        EpDispatchCombineOp(config, arena=arena, index=index)


def test_a_forked_child_is_refused(manager, monkeypatch):
    op = manager.get_handle(KWARGS)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (lambda: op.dispatch(TOKENS, WEIGHTS, None, IDS), op.reset):
        with pytest.raises(errors.ForkedProcessError):
            call()


def test_memory_that_peers_overwrite_is_refused(manager):
    op = manager.get_handle({**KWARGS, "layout": "rank_major"})
    received, _, _, ids, _ = op.dispatch(TOKENS, WEIGHTS, None, IDS)
    inside, rows = received[0, :3], torch.ones_like(received)
    with pytest.raises(errors.InputError, match="out outside of what dispatch returned"):
        op.combine(rows, None, None, out=inside)
    tokens, sums = op.combine(rows, torch.ones(8, TOPK), None)
    assert torch.equal(tokens[:3], TOKENS)
    with pytest.raises(errors.InputError, match="input outside of what dispatch returned"):
        op.dispatch(inside, WEIGHTS, None, IDS)
    for overwritten in (ids[0, :3], received.flatten().view(torch.int32)[: 3 * TOPK].view(3, TOPK)):
        with pytest.raises(errors.InputError, match="indices outside of what dispatch returned"):
            op.dispatch(TOKENS, WEIGHTS, None, overwritten)
    op.dispatch(TOKENS, WEIGHTS, None, IDS)
    with pytest.raises(errors.InputError, match="weights outside of the weight sums"):
        op.combine(rows, sums, None)


@pytest.mark.parametrize(
    ("tokens", "scales", "error", "match"),
    [
        (TOKENS, None, errors.InputError, "the scale of the cast fp8_static as scales"),
        (TOKENS[:0], None, errors.InputError, "the scale of the cast fp8_static as scales"),
        (TOKENS, torch.ones(2), errors.ShapeError, "one element"),
        (TOKENS, torch.ones(1, dtype=torch.float64), errors.DtypeError, "scales"),
        (TOKENS, torch.ones(1, device="meta"), errors.DeviceError, "scales"),
        (TOKENS.to(FP8_DTYPE), torch.ones(1), errors.InputError, "fp8_static sends none"),
    ],
)
def test_a_wrong_scale_of_a_static_cast_is_refused(manager, tokens, scales, error, match):
    op = manager.get_handle({**KWARGS, "quant_dtype": FP8_DTYPE, "dispatch_quant_type": "fp8_static"})
    with pytest.raises(error, match=match):
        op.dispatch(tokens, WEIGHTS[: len(tokens)], scales, IDS[: len(tokens)])


def test_a_rank_without_tokens_has_scales_where_others_bring_theirs(manager):
    """Its kernels move other ranks' scales; without a tensor they left those of an earlier step."""
    config = manager.get_handle({**KWARGS, "quant_dtype": FP8_DTYPE, "dispatch_quant_type": "fp8_per_1x128"}).config
    scales = travelling_scales(config, torch.empty(0, HIDDEN, dtype=FP8_DTYPE), None)
    assert (scales.shape, scales.dtype) == ((0, 1), torch.float32)


@pytest.mark.parametrize("alignment", [4, 48])
def test_rows_behind_an_experts_rows_are_zeros_up_to_its_alignment(manager, alignment):
    op = manager.get_handle({**KWARGS, "layout": "expert_major", "expert_alignment": alignment})
    # rows of an earlier step are everywhere
    op.memory.view(Region.EXPERT_ROWS).fill_(1)
    rows = op.dispatch(TOKENS, WEIGHTS, None, IDS, step_tokens=3).tokens
    for expert, count in enumerate(op.expert_recv_count.tolist()):
        end = min(-(-count // alignment) * alignment, rows.shape[1])
        assert (rows[expert, :count] == 1).all()
        assert (rows[expert, count:end] == 0).all()


def test_the_bound_of_a_step_has_an_older_name(manager):
    op = manager.get_handle({**KWARGS, "layout": "rank_major"})
    with pytest.raises(errors.InputError, match="both"):
        op.dispatch(TOKENS, WEIGHTS, None, IDS, step_tokens=3, max_num_tokens=3)
    assert op.dispatch(TOKENS, WEIGHTS, None, IDS, max_num_tokens=3).tokens.shape == (1, 3, HIDDEN)
    op.combine(TOKENS, None, None)
    assert op.dispatch_send(TOKENS, WEIGHTS, None, IDS, max_num_tokens=[4]).tokens.shape == (4, HIDDEN)
