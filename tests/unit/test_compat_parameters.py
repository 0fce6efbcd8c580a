"""The table of ep_a2a.compat: all parameters that have no effect are in it, and it says what calls really do."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ep_a2a
from ep_a2a import env
from ep_a2a.compat import deep_ep, mori
from ep_a2a.compat.deep_ep import Buffer, buffer_base
from ep_a2a.compat.mori import ops, shmem
from ep_a2a.compat.parameters import ROWS, Effect, Row, warn_once
from ep_a2a.compat.triton_distributed import EPLowLatencyAllToAllLayer, contexts, create_ep_ll_a2a_ctx
from ep_a2a.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from ep_a2a.errors import ConfigError, EnvironmentVariableError, NotInitializedError, UnknownNameError, UnsupportedError
from ep_a2a.log_once import log_once
from tests.unit.test_mori_combine_input import CONFIG, open_step

MODULES = {"aiter": ("",), "deep_ep": ("",), "mori": ("ops", "shmem"), "triton_distributed": ("", "utils")}
KEPT_ON_PURPOSE = {
    # keeping them alive is all that is asked for
    "deep_ep EventOverlap extra_tensors"
}


# --- every parameter without effect is in the table ---


def found_in(library: str, name: str) -> Any:
    """The object of a row's name; AttributeError where there is none."""
    return pkgutil.resolve_name(f"ep_a2a.compat.{library}.{name}")


def public_functions() -> Iterator[tuple[str, str, Any]]:
    """(library, name, function) of every public function and method of ep_a2a.compat, and of every constructor."""
    for library, name in ((library, below) for library, all_below in MODULES.items() for below in all_below):
        module = importlib.import_module(".".join(filter(None, ("ep_a2a.compat", library, name))))
        for thing in (getattr(module, each) for each in module.__all__):
            path = f"{name}.{getattr(thing, '__name__', '')}".lstrip(".")
            if inspect.isfunction(thing) and thing.__module__.startswith("ep_a2a.compat"):
                yield library, path, thing
            for kind in inspect.getmro(thing) if inspect.isclass(thing) else ():
                for method, each in vars(kind).items() if kind.__module__.startswith("ep_a2a.compat") else ():
                    plain = getattr(each, "__func__", each)
                    is_written = inspect.isfunction(plain) and plain.__code__.co_filename.endswith(".py")
                    if is_written and (method == "__init__" or not method.startswith("_")):
                        yield library, f"{path}.{method}".removesuffix(".__init__"), plain


def without_effect(function: Callable[..., Any]) -> list[str]:
    """Parameters that the body does not read, or only keeps in attributes of their name that its module never reads."""
    module = ast.parse(inspect.getsource(inspect.getmodule(function)))  # type: ignore[arg-type]
    attributes = {
        each.attr for each in ast.walk(module) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load)
    }
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    body = [each for statement in definition.body for each in ast.walk(statement)]  # type: ignore[attr-defined]
    kept = {id(value): value.id for each in body if isinstance(each, ast.Assign) for value in kept_values(each)}
    deleted = [each for each in body if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Del)]
    read = {each.id for each in body if isinstance(each, ast.Name) and each not in deleted and id(each) not in kept}
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    return [name for name in names if name not in read | (set(kept.values()) & attributes)]


def kept_values(statement: ast.Assign) -> list[ast.Name]:
    """Names that a statement only assigns to attributes of the same name: `self.a, self.b = a, b`."""
    targets = [each for target in statement.targets for each in getattr(target, "elts", [target])]
    pairs = zip(targets, getattr(statement.value, "elts", [statement.value]), strict=False)
    return [v for t, v in pairs if isinstance(t, ast.Attribute) and isinstance(v, ast.Name) and t.attr == v.id]


def in_table(library: str, function: str, parameter: str) -> bool:
    return any(
        row.library == library
        and function in row.callables.split()
        and (not row.parameters or parameter in row.parameters.split())
        for row in ROWS
    )


def test_every_parameter_is_read_or_in_the_table():
    functions = list(public_functions())
    assert len(functions) > 60
    missing = {
        f"{library} {name} {parameter}"
        for library, name, function in functions
        for parameter in without_effect(function)
        if not in_table(library, name, parameter)
    }
    assert missing == KEPT_ON_PURPOSE


FIELDS = {("deep_ep", "Config"): deep_ep.Config, ("mori", "ops.EpDispatchCombineConfig"): EpDispatchCombineConfig}


@pytest.mark.parametrize(("library", "name"), FIELDS)
def test_every_field_is_read_or_in_the_table(library: str, name: str):
    text = "\n".join(path.read_text() for path in Path(ep_a2a.__file__).parent.rglob("*.py"))
    fields = [each.name for each in dataclasses.fields(FIELDS[library, name])]
    unread = {field for field in fields if not re.search(rf"(config|self)\.{field}\b", text)}
    assert not {field for field in unread if not in_table(library, name, field)}


def test_rows_name_what_there_is():
    for row in ROWS:
        for name in row.callables.split():
            thing = found_in(row.library, name)
            known = set(inspect.signature(thing).parameters)
            assert set(row.parameters.split()) <= known, (name, row.parameters)
        assert row.text.endswith("."), row


def test_no_parameter_has_two_rows_for_the_same_values():
    cases = [
        (row.library, name, parameter, row.when)
        for row in ROWS
        for name in row.callables.split()
        for parameter in row.parameters.split() or [""]
    ]
    assert len(cases) == len(set(cases))


# --- each warning comes once, each refusal is an error with the remedy of its row ---

IDS = torch.zeros(3, 2, dtype=torch.int32)
WEIGHTS = torch.ones(3, 2)
STEP = open_step()
RECEIVED = STEP.dispatched


class NativeOp:
    """Stands for our op: takes any call."""

    config, device, open_step = CONFIG, torch.device("cpu"), STEP
    local_expert_count = torch.zeros(2, dtype=torch.int32)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: RECEIVED if name.startswith("dispatch") else None


DEEP_EP_OPS = SimpleNamespace(rank=0, world_size=2, device=torch.device("cpu"), close=lambda: None)
"""Stands for a buffer's ops."""


def op() -> Any:
    made = ops.EpDispatchCombineOp.around(NativeOp())  # type: ignore[arg-type]
    made.dispatch(RECEIVED.tokens, WEIGHTS, None, IDS)
    return made


def op_of(**changes: Any) -> None:
    with contextlib.suppress(NotInitializedError):
        ops.EpDispatchCombineOp(dataclasses.replace(CONFIG, **changes))


def op_in_a_node(kernel_type: EpDispatchCombineKernelType) -> None:
    world = object.__new__(shmem.World)
    world.arena = ARENA  # type: ignore[assignment]
    world._topology = lambda _: SimpleNamespace(internode=False)  # type: ignore[assignment,return-value]
    world.factory = SimpleNamespace(make=lambda *_: None)  # type: ignore[assignment]
    world.make_op(dataclasses.replace(CONFIG, kernel_type=kernel_type))


def buffer(**arguments: Any) -> Any:
    return Buffer(object(), **arguments)  # type: ignore[arg-type]


def split(name: str, **launch: int) -> None:
    arguments = {"dispatch_send": (RECEIVED.tokens, None, None, IDS), "combine_send": (RECEIVED.tokens, None, None)}
    getattr(op(), name)(*arguments.get(name, ()), **launch)


OP = "ops.EpDispatchCombineOp"
ROWS_GIVEN = RECEIVED.tokens
WARNS: dict[str, Callable[[], Any]] = {
    "deep_ep Buffer num_nvl_bytes": lambda: buffer(num_nvl_bytes=1),
    "deep_ep Buffer num_rdma_bytes": lambda: buffer(num_rdma_bytes=1),
    "deep_ep Buffer num_qps_per_rank": lambda: buffer(num_qps_per_rank=12),
    "deep_ep Buffer allow_nvlink_for_low_latency_mode": lambda: buffer(allow_nvlink_for_low_latency_mode=False),
    "deep_ep Buffer allow_mnnvl": lambda: buffer(allow_mnnvl=True),
    "deep_ep Buffer use_fabric": lambda: buffer(use_fabric=True),
    "mori ops.EpDispatchCombineConfig block_num": lambda: op_of(block_num=40),
    "mori ops.EpDispatchCombineConfig warp_num_per_block": lambda: op_of(warp_num_per_block=4),
    "mori ops.EpDispatchCombineConfig rdma_block_num": lambda: op_of(rdma_block_num=4),
    "mori ops.EpDispatchCombineConfig num_qp_per_pe": lambda: op_of(num_qp_per_pe=2, launch="manual"),
    "mori ops.EpDispatchCombineConfig kernel_type": lambda: op_in_a_node(EpDispatchCombineKernelType.AsyncLL),
    f"mori {OP}.dispatch rdma_block_num": lambda: op().dispatch(ROWS_GIVEN, None, None, IDS, rdma_block_num=4),
    f"mori {OP}.combine rdma_block_num": lambda: op().combine(ROWS_GIVEN, None, None, rdma_block_num=4),
    f"mori {OP}.get_launch_config rdma_block_num": lambda: op().get_launch_config(rdma_block_num=4),
    f"mori {OP}.combine weights": lambda: op().combine(ROWS_GIVEN, WEIGHTS, None),
    f"mori {OP}.combine indices": lambda: op().combine(ROWS_GIVEN, None, RECEIVED.indices),
    f"mori {OP}.combine_send weights": lambda: op().combine_send(ROWS_GIVEN, WEIGHTS, None),
    f"mori {OP}.combine_send indices": lambda: op().combine_send(ROWS_GIVEN, None, RECEIVED.indices),
    **{
        f"mori {OP}.{name} {number}": functools.partial(split, name, **{number: 8})
        for name in ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
        for number in ("block_num", "warp_per_block")
    },
}
"""By library, callable and parameter of a row."""


BARE = object.__new__(Buffer)
BARE._closed = False
LAYER = {
    "max_m": 8,
    "hidden": 128,
    "topk": 2,
    "online_quant_fp8": False,
    "rank": 0,
    "num_experts": 4,
    "local_world_size": 3,
    "world_size": 2,
    "fp8_gsize": 128,
    "dtype": torch.bfloat16,
}
ARENA = SimpleNamespace(unshared_index=lambda: 0, group=None, device=None)
ARENA.rendezvous = SimpleNamespace(telling=contextlib.nullcontext)
REFUSES: dict[str, Callable[[], Any]] = {
    "deep_ep Buffer enable_shrink": lambda: buffer(enable_shrink=True),
    "deep_ep Buffer comm": lambda: Buffer(None, comm=1),
    "deep_ep Buffer.low_latency_dispatch dispatch_wait_recv_cost_stats": functools.partial(
        BARE.low_latency_dispatch, RECEIVED.tokens, IDS, 8, 4, dispatch_wait_recv_cost_stats=IDS
    ),
    "deep_ep Buffer.low_latency_combine combine_wait_recv_cost_stats": functools.partial(
        BARE.low_latency_combine, RECEIVED.tokens, IDS, WEIGHTS, None, combine_wait_recv_cost_stats=IDS
    ),
    "deep_ep Buffer.low_latency_combine use_logfmt": functools.partial(
        BARE.low_latency_combine, RECEIVED.tokens, IDS, WEIGHTS, None, use_logfmt=True
    ),
    f"mori {OP}.dispatch routing": lambda: op().dispatch(ROWS_GIVEN, None, None, IDS, routing=1),
    f"mori {OP}.dispatch return_routing": lambda: op().dispatch(ROWS_GIVEN, None, None, IDS, return_routing=True),
    f"mori {OP}.combine routing": lambda: op().combine(ROWS_GIVEN, None, None, routing=1),
    "mori shmem.shmem_malloc_align alignment": lambda: mori.shmem.shmem_malloc_align(512, 1),
    "mori shmem.symm_mori_shmem_tensor peer": lambda: mori.shmem.symm_mori_shmem_tensor(IDS, 1),
    "triton_distributed EPLowLatencyAllToAllLayer local_world_size": lambda: EPLowLatencyAllToAllLayer(
        **LAYER, arena=ARENA
    ),
    "triton_distributed create_ep_ll_a2a_ctx local_world_size": lambda: create_ep_ll_a2a_ctx(**LAYER, arena=ARENA),
}


def cases(effect: Effect) -> dict[str, Row]:
    return {
        f"{row.library} {name} {parameter}": row
        for row in ROWS
        if row.effect is effect
        for name in row.callables.split()
        for parameter in row.parameters.split() or [""]
    }


WARNED, REFUSED = cases(Effect.WARNED), cases(Effect.REFUSED)
ALWAYS_REFUSED = {case: found_in(*case.split()) for case in REFUSED if case.endswith(" ")}
REFUSES |= ALWAYS_REFUSED


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    warn_once.cache_clear()
    monkeypatch.setattr(buffer_base, "Ops", lambda *_: DEEP_EP_OPS)
    monkeypatch.setattr(shmem.shmem, "shmem_mype", lambda: 0)
    monkeypatch.setattr(contexts, "gather_report", lambda *_: None)


def test_every_row_is_tried():
    assert WARNS.keys() == WARNED.keys()
    assert REFUSES.keys() == REFUSED.keys()


@pytest.mark.parametrize("case", WARNS)
def test_a_warning_comes_once(case: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        WARNS[case]()
        WARNS[case]()
    assert len(caplog.records) == 1
    text = caplog.records[0].getMessage()
    assert case.split()[2] in text
    assert WARNED[case].text in text
    assert "docs/arguments.md" in text


@pytest.mark.parametrize("case", REFUSES)
def test_a_refusal_has_the_remedy_of_its_row(case: str):
    with pytest.raises(UnsupportedError) as caught:
        REFUSES[case]()
    assert caught.value.remedy == REFUSED[case].text
    if case in ALWAYS_REFUSED:
        assert case.split()[1] in str(caught.value)
        with pytest.raises(UnsupportedError):
            REFUSES[case][(8,)]  # type: ignore[index]  # as a kernel is launched


def test_a_value_that_is_refused_is_named():
    with pytest.raises(UnsupportedError, match="shmem_malloc_align with an alignment of at most 256 bytes; got 512"):
        mori.shmem.shmem_malloc_align(512, 1)


def test_defaults_and_what_programs_must_pass_warn_of_nothing(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        buffer(low_latency_mode=True)
        op_of()
        op_of(block_num=40, warp_num_per_block=4, launch="manual")
        op_in_a_node(EpDispatchCombineKernelType.IntraNode)
        made = op()
        made.dispatch(ROWS_GIVEN, WEIGHTS, None, IDS, block_num=80, warp_per_block=8)
        made.combine(ROWS_GIVEN, None, IDS, block_num=80, rdma_block_num=0, warp_per_block=8, call_reset=True)
        made.dispatch_send(ROWS_GIVEN, WEIGHTS, None, IDS)
        made.dispatch_recv()
        made.combine_send(ROWS_GIVEN, None, IDS)
        made.combine_recv()
    assert not caplog.records


def test_half_a_dispatch_counts_local_experts_as_asked():
    made = op()
    made.local_expert_count.fill_(-1)
    made.dispatch_send(ROWS_GIVEN, None, None, IDS, call_local_expert_count=True)
    assert made.local_expert_count.tolist() == [-1, -1]
    made.dispatch_recv()
    assert made.local_expert_count.tolist() == [RECEIVED.indices.numel(), 0]


@pytest.mark.parametrize("name", ["num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts"])
@pytest.mark.parametrize("number", [0, -8, 1.5])
def test_size_hints_are_of_positive_numbers(name: str, number: float):
    sizes: dict[str, Any] = {"num_max_dispatch_tokens_per_rank": 8, "hidden": 128, "num_ranks": 2, "num_experts": 4}
    with pytest.raises(ConfigError, match=name):
        Buffer.get_low_latency_rdma_size_hint(**{**sizes, name: number})


@pytest.mark.parametrize(
    ("ours", "devices", "named"),
    [("", "^mlx5_0", "MORI_SHMEM_HEAP_SIZE"), ("mlx5_1", "mlx5_1", "MORI_RDMA_DEVICES, MORI_SHMEM_HEAP_SIZE")],
)
def test_variables_of_mori(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ours: str, devices: str, named: str
):
    """The RDMA devices count unless ours are set; the others are named once."""
    variables = {"MORI_RDMA_DEVICES": "^mlx5_0", "MORI_SHMEM_HEAP_SIZE": "4G", "MORI_EMPTY": ""}
    for name, value in (variables | {env.RDMA_DEVICES.name: ours}).items():
        monkeypatch.setenv(name, value)
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with pytest.raises(UnknownNameError):
                mori.shmem.shmem_torch_process_group_init("no such group")
    assert [record.getMessage() for record in caplog.records] == [
        f"MORI on ep_a2a: {named} without effect; see docs/env.md."
    ]
    assert env.RDMA_DEVICES.get() == devices
    monkeypatch.setenv("MORI_RDMA_DEVICES", "mlx5_0 mlx5_1")
    with pytest.raises(EnvironmentVariableError, match="MORI_RDMA_DEVICES to be RDMA devices"):
        mori.shmem.shmem_torch_process_group_init("no such group")
