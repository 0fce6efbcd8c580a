"""Tensors that no public call takes, and torch modes that no public call keeps: every call, alone in a group."""

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ep_a2a
from ep_a2a.compat.deep_ep import Buffer
from ep_a2a.compat.mori.ops import EpDispatchCombineOp as MoriOp
from ep_a2a.compat.triton_distributed import EPLowLatencyAllToAllLayer
from ep_a2a.config import FP8_DTYPE
from ep_a2a.errors import InputError
from ep_a2a.memory.arena import Arena
from ep_a2a.ops.row_exchange import row_bytes
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case
from tests.library_stand_ins import FlashInferOneSidedManager, flashinfer_modules

T, H, K, E = 4, 16, 2, 4
TOKENS = torch.arange(T * H, dtype=torch.float32).reshape(T, H).to(torch.bfloat16)
WEIGHTS = torch.arange(T * K, dtype=torch.float32).reshape(T, K) / 8
IDS = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]], dtype=torch.int32)
SCALES = torch.arange(T, dtype=torch.float32).reshape(T, 1) + 1
KWARGS = kwargs_of(Case(1, H, K, E, max_tokens=T), 0)
pytestmark = pytest.mark.usefixtures("group")
SCALED = KWARGS | {"quant_dtype": FP8_DTYPE, "scale_dim": 1, "scale_type_size": 4}

Calls = Generator[tuple[Callable[..., Any], dict[str, Any]], Any, None]
"""Yields (call, its arguments by name), and is sent the result."""


def whole(op: Any) -> Calls:
    got = yield op.dispatch, {"input": TOKENS, "weights": WEIGHTS, "scales": None, "indices": IDS}
    rows = {"input": got[0], "weights": got[1], "indices": IDS}
    yield op.combine, rows | {"out": TOKENS.clone(), "bias_0": TOKENS, "bias_1": TOKENS}


def of_a_library(op: Any) -> Calls:
    got = yield op.dispatch, {"input": TOKENS, "weights": None, "scales": None, "indices": IDS}
    yield op.get_dispatch_src_token_pos, {}
    yield op.combine, {"input": got[0], "weights": None, "indices": IDS, "out": TOKENS.clone(), "bias_0": TOKENS}


def cast_already(op: Any) -> Calls:
    got = yield op.dispatch, {"input": TOKENS.to(FP8_DTYPE), "weights": None, "scales": SCALES, "indices": IDS}
    yield op.combine, {"input": got[0].to(torch.bfloat16), "weights": None, "indices": None}


def halves(op: Any) -> Calls:
    yield op.dispatch_send, {"input": TOKENS, "weights": WEIGHTS, "scales": None, "indices": IDS}
    got = yield op.dispatch_recv, {}
    yield lambda: op.recv_counts, {}
    yield lambda: op.local_expert_count, {}
    yield op.get_dispatch_src_token_pos, {}
    rows = yield op.get_registered_combine_input_buffer, {"dtype": torch.bfloat16}
    rows.copy_(got[0].flatten(0, -2))
    yield op.combine_send, {"input": rows, "weights": got[1], "out": TOKENS.clone(), "bias_0": TOKENS}
    yield op.combine_recv, {}
    yield op.set_timeout, {"timeout_secs": 60.0}
    yield op.reset, {}


def in_mori(op: Any) -> Calls:
    got = yield op.dispatch, {"input": TOKENS[:3], "weights": WEIGHTS[:3], "scales": None, "indices": IDS[:3]}
    yield op.combine, {"input": got[0][:3].clone(), "weights": got[1][:3].clone(), "indices": IDS[:3]}


def hidden_states(manager: Any) -> Calls:
    given = {"hidden_states": TOKENS, "topk_weights": WEIGHTS, "topk_ids": IDS}
    got = yield manager.dispatch, given
    yield manager.combine, {"hidden_states": got[0]}
    got = yield manager.dispatch, given
    yield manager.combine_into_output, {"hidden_states": got[0], "output": TOKENS.clone()}


def logits(manager: Any) -> Calls:
    given = {"hidden_states": TOKENS, "router_logits": WEIGHTS}
    got = yield manager.dispatch_router_logits, given | {"extra_tensors": [SCALES]}
    yield manager.combine, {"hidden_states": got[0]}


def normal(buffer: Any) -> Calls:
    layout = yield buffer.get_dispatch_layout, {"topk_idx": IDS, "num_experts": E}
    given = {"x": TOKENS, "topk_idx": IDS, "topk_weights": WEIGHTS, "num_tokens_per_rank": "not looked at"}
    given |= {"num_tokens_per_expert": layout[2], "is_token_in_rank": layout[3]}
    got = yield buffer.dispatch, given
    rows = {"x": got[0], "topk_weights": got[2], "handle": got[4]}
    yield buffer.combine, rows | {"bias": (TOKENS, TOKENS)}
    got = yield buffer.dispatch, given | {"x": (TOKENS.to(FP8_DTYPE), SCALES)}
    yield buffer.combine, {"x": got[0][0].to(torch.bfloat16), "handle": got[4]}


def low_latency(buffer: Any) -> Calls:
    given = {"x": TOKENS, "topk_idx": IDS, "num_max_dispatch_tokens_per_rank": T, "num_experts": E, "use_fp8": False}
    stats = torch.zeros(E, dtype=torch.int32)
    got = yield buffer.low_latency_dispatch, given | {"cumulative_local_expert_recv_stats": stats}
    rows = {"x": got[0], "topk_idx": IDS.clone(), "topk_weights": WEIGHTS, "handle": got[2]}
    yield buffer.low_latency_combine, rows | {"out": TOKENS.clone()}


def of_a_layer(layer: Any) -> Calls:
    got = yield layer.dispatch, {"send_tokens": TOKENS, "send_scales": None, "topk_indices": IDS}
    rows = {"send_tokens": got[0], "topk_indices": IDS, "topk_weights": WEIGHTS, "dispatch_meta": got[3]}
    yield layer.combine, rows


@contextlib.contextmanager
def of_manager(backend: str, kwargs: Any = KWARGS, wrap: Callable[[Any], Any] = lambda handle: handle) -> Any:
    with ep_a2a.create_manager(backend, dist.group.WORLD) as manager:
        manager.device = "cpu"
        yield wrap(manager.get_handle(kwargs))


@contextlib.contextmanager
def manager_of(backend: str) -> Any:
    with ep_a2a.create_manager(backend, dist.group.WORLD) as manager:
        manager.device = "cpu"
        handle = manager.get_handle(KWARGS)
        yield manager
        del handle


@contextlib.contextmanager
def of_flashinfer() -> Any:
    with (
        mock.patch.dict(sys.modules, flashinfer_modules()),
        mock.patch("torch.cuda.synchronize"),
        FlashInferOneSidedManager(dist.group.WORLD) as manager,
    ):
        manager.device = "cpu"
        yield manager.get_handle(KWARGS | {"layout": "rank_major"})


@contextlib.contextmanager
def deep_ep() -> Any:
    buffer = Buffer(dist.group.WORLD, device="cpu", explicitly_destroy=True)
    yield buffer
    buffer.destroy()


@contextlib.contextmanager
def a_layer() -> Any:
    with Arena(dist.group.WORLD, torch.device("cpu")) as arena:
        layer = EPLowLatencyAllToAllLayer(T, H, K, False, 0, E, 1, 1, arena=arena)
        yield layer
        layer.finalize()


PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], Calls]]] = {
    "op": (lambda: of_manager("ep_a2a"), whole),
    "op, fp8": (lambda: of_manager("ep_a2a", SCALED), cast_already),
    "op, rank_major": (lambda: of_manager("ep_a2a", KWARGS | {"layout": "rank_major"}), halves),
    "naive op": (lambda: of_manager("naive"), whole),
    "naive op, fp8": (lambda: of_manager("naive", SCALED), cast_already),
    "naive op, halves": (lambda: of_manager("naive"), halves),
    "flashinfer": (of_flashinfer, of_a_library),
    "mori": (lambda: of_manager("ep_a2a", wrap=MoriOp.around), in_mori),
    "ep_a2a": (lambda: manager_of("ep_a2a"), hidden_states),
    "naive": (lambda: manager_of("naive"), hidden_states),
    "naive, logits": (lambda: manager_of("naive"), logits),
    "allgather_reducescatter": (lambda: manager_of("allgather_reducescatter"), hidden_states),
    "deep_ep": (deep_ep, normal),
    "deep_ep, low latency": (deep_ep, low_latency),
    "triton_distributed": (a_layer, of_a_layer),
}


UNFILLED = {"dispatch_send", "combine_send", "get_registered_combine_input_buffer"}
"""Calls that return memory which nobody has written yet."""


def tensors_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, tuple | list):
        return [tensor for each in result for tensor in tensors_of(each)]
    return [result] if isinstance(result, torch.Tensor) else []


def drive(
    calls: Calls,
    before: Callable[[Callable[..., Any], dict[str, Any]], None] = lambda call, given: None,
    mode: Callable[[], Any] = contextlib.nullcontext,
) -> list[torch.Tensor]:
    """Make a program's calls in a mode, and `before` with each call that comes; return copies of the results."""
    results: list[torch.Tensor] = []
    with contextlib.suppress(StopIteration):
        call, given = next(calls)
        while True:
            before(call, given)
            with mode():
                result = call(**given)
            if call.__name__ not in UNFILLED:
                results += [tensor.clone() for tensor in tensors_of(result)]
            if mode is contextlib.nullcontext:
                for tensor in tensors_of(result):
                    tensor.copy_(tensor.clone())
            call, given = calls.send(result)
    return results


def replaced(given: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> list[dict[str, Any]]:
    """The arguments with one tensor changed, for each of them, also in tuples and lists."""
    found = []
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            found.append(given | {name: change(value)})
        elif type(value) in (tuple, list):
            for place, each in enumerate(value):
                found.append(given | {name: type(value)([*value[:place], change(each), *value[place + 1 :]])})
    return found


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory_are_refused(name):
    """Also after a call with real tensors of the same shapes, which has filled the caches of checks."""
    make, program = PROGRAMS[name]

    def refuse(call: Callable[..., Any], given: dict[str, Any]) -> None:
        for change in (fake.from_tensor, torch._to_functional_tensor):
            for bad in replaced(given, change):
                with pytest.raises(InputError, match="with memory; got a tensor without"):
                    call(**bad)

    fake = FakeTensorMode()
    with make() as made:
        drive(program(made))
        drive(program(made), refuse)


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def test_tensors_without_memory_are_refused_before_torch_converts_them():
    """Torch would read them from address 0."""
    longs = emptied(IDS.long())
    with of_manager("ep_a2a", wrap=MoriOp.around) as op, pytest.raises(InputError, match="indices with memory"):
        op.dispatch(TOKENS, WEIGHTS, None, longs)
    with manager_of("ep_a2a") as manager:
        for weights, ids in ((WEIGHTS, longs), (emptied(WEIGHTS.half()), IDS), (WEIGHTS, emptied(IDS.short()))):
            with pytest.raises(InputError, match="with memory"):
                manager.dispatch(TOKENS, weights, ids)


def test_tensors_of_a_transform_are_refused():
    """Torch has no address for them; the call before has filled the caches of checks."""
    with of_manager("ep_a2a") as op:
        drive(whole(op))
        with pytest.raises(InputError, match="input with memory"):
            torch.vmap(lambda tokens: op.dispatch(tokens, WEIGHTS, None, IDS)[0])(torch.stack([TOKENS, TOKENS]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_tensors_that_require_grad_are_refused_while_torch_records_gradients(name):
    make, program = PROGRAMS[name]

    def graded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point() and tensor.itemsize > 1)

    def refuse(call: Callable[..., Any], given: dict[str, Any]) -> None:
        for bad in replaced(given, graded):
            if any(tensor.requires_grad for tensor in tensors_of(list(bad.values()))):
                with pytest.raises(
                    InputError, match=r"requires grad. Call ep_a2a.autograd.* torch.no_grad\(\), .*detach\(\)"
                ):
                    call(**bad)

    with make() as made:
        drive(program(made), refuse)
        with torch.no_grad():
            results = drive(program(made))
        assert not any(tensor.requires_grad for tensor in tensors_of(results))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.clone() if isinstance(result, torch.Tensor) else result


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.clone() if isinstance(result, torch.Tensor) else result


@contextlib.contextmanager
def all_modes() -> Any:
    with (
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
        Functions(),
        FakeTensorMode(),
        Dispatches(),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


MODES = {"inference mode": torch.inference_mode, "all modes": all_modes}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_call_keeps_the_mode_of_another(name, mode):
    """Results of calls in a mode and behind it are right; those behind it can be written to."""
    make, program = PROGRAMS[name]
    with make() as made:
        expected = drive(program(made))
    with contextlib.ExitStack() as stack:
        with MODES[mode]():
            made = stack.enter_context(make())
        for results in (drive(program(made), mode=MODES[mode]), drive(program(made))):
            for tensor, right in zip(results, expected, strict=True):
                assert torch.equal(tensor, right)


def test_rows_of_an_empty_tensor_become_bytes_whatever_its_strides():
    rows = torch.empty((0, 2), dtype=torch.int32).as_strided((0, 2), (0, 0))
    assert row_bytes(rows).shape == (0, 8)
