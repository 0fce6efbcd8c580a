"""Registry, handle cache, handle kwargs and what managers promise, without other ranks."""

import gc
import inspect
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from ep_a2a.compat.mori.ops import EpDispatchCombineOp as MoriOp
from ep_a2a.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from ep_a2a.config.handle_kwargs import EXTRA_KWARGS, REQUIRED_KWARGS, config_from_handle_kwargs
from ep_a2a.errors import AlternationError, ClosedError, ConfigError, StateError, UnknownNameError, UnsupportedError
from ep_a2a.managers import registry
from ep_a2a.managers.base import All2AllManagerBase, Cache
from ep_a2a.managers.collective import AllGatherReduceScatterAll2AllManager, NaiveAll2AllManager
from ep_a2a.managers.native import NativeAll2AllManager
from ep_a2a.policy import FLAG_PROGRAMS, Phase
from ep_a2a.topology import RankFacts, TopologyReport

MANAGERS = {
    "ep_a2a": NativeAll2AllManager,
    "naive": NaiveAll2AllManager,
    "allgather_reducescatter": AllGatherReduceScatterAll2AllManager,
}


class Handle:
    """Anything that can be referred to weakly."""


# --- cache ---


def test_a_key_finds_its_handle_while_somebody_holds_it():
    cache = Cache()
    first = cache.get_or_create((16, 0), Handle)
    assert cache.get_or_create((16, 0), Handle) is first
    other = cache.get_or_create((16, 1), Handle)
    assert other is not first
    assert len(cache) == 2
    assert cache.handles() == [first, other]
    assert cache.get_or_create((16, 0), Handle) is first
    assert cache.handles() == [other, first]  # the last one is the one that was asked for last
    del other
    gc.collect()
    assert len(cache) == 1
    cache.clear()
    assert len(cache) == 0
    assert cache.get_or_create((16, 0), Handle) is not first


def test_threads_that_ask_at_once_get_one_handle_made_once():
    cache, made, running = Cache(), [], []
    start = threading.Barrier(8)

    def ask(number: int) -> None:
        def make() -> Handle:
            running.append(1)
            assert len(running) == 1
            made.append(number % 2)
            running.pop()
            return Handle()

        start.wait()
        handles.append(cache.get_or_create(number % 2, make))

    handles: list[Handle] = []
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [0, 1]
    assert len(handles) == 8
    assert len({id(handle) for handle in handles}) == 2


def test_a_constructor_that_asks_for_another_handle_or_fails():
    cache = Cache()
    inner: list[Handle] = []

    def make() -> Handle:
        inner.append(cache.get_or_create("inner", Handle))
        return Handle()

    outer = cache.get_or_create("outer", make)
    assert cache.handles() == [inner[0], outer]

    def fail() -> Handle:
        raise ConfigError("this", "that")

    with pytest.raises(ConfigError):
        cache.get_or_create("failed", fail)
    assert cache.get_or_create("failed", Handle)


# --- registry ---


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    monkeypatch.setattr(registry, "_names", dict(registry._names))


def test_an_unknown_name_lists_the_backends_and_suggests_one():
    with pytest.raises(UnknownNameError, match=r"'allgather_reducescatter'.*got 'niave'. Did you mean 'naive'\?"):
        registry.create_manager("niave", None)
    with pytest.raises(UnknownNameError, match="one of the listed names"):
        registry.create_manager("zzzzzz", None)


@pytest.mark.usefixtures("own_registry")
def test_registering():
    calls = []

    def create(cpu_group, tcp_store_group=None):
        calls.append((cpu_group, tcp_store_group))
        return "manager"

    registry.register_manager("mine", create, aliases=("my_own",))
    assert registry.available_backends()[-1] == "mine"
    assert registry.create_manager("my_own", "group", "store") == "manager"
    assert calls == [("group", "store")]
    with pytest.raises(ConfigError, match="'my_own'"):
        registry.register_manager("other", create, aliases=("my_own",))
    registry.register_manager("naive", create, replace=True)
    assert registry.create_manager("naive", "group") == "manager"
    for target in ("module_only", ":Class", "module:", 3):
        with pytest.raises(ConfigError, match="module:Class"):
            registry.register_manager("bad", target)  # type: ignore[arg-type]


SINGLE_RANK_PROGRAM = """
import sys, torch.distributed as dist
from ep_a2a.errors import MissingPackageError
from ep_a2a.managers.registry import available_backends, create_manager, manager_type
assert "ep_a2a.managers.base" not in sys.modules
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for name in available_backends():
    try:
        create_manager(name, dist.group.WORLD).destroy()
    except MissingPackageError:
        assert manager_type(name).library.problem()
assert "triton" not in sys.modules and "ep_a2a.reference" not in sys.modules
dist.destroy_process_group()
"""


def test_managers_are_made_without_loading_triton():
    subprocess.run([sys.executable, "-c", SINGLE_RANK_PROGRAM], check=True, timeout=120)


# --- handle kwargs ---


def handle_kwargs(**changes: Any) -> dict[str, Any]:
    """AITER's handle kwargs for world size 8."""
    kwargs = {
        "rank": 3,
        "num_ep_ranks": 8,
        "input_dtype": torch.bfloat16,
        "quant_dtype": torch.float8_e4m3fn,
        "token_hidden_size": 7168,
        "scale_dim": 56,
        "scale_type_size": 4,
        "max_num_tokens_per_dp_rank": 4096,
        "num_local_experts": 32,
        "num_experts_per_token": 8,
        "gpu_per_node": 8,
    }
    return {name: value for name, value in {**kwargs, **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    ("internode", "launch"),
    [
        (False, (EpDispatchCombineKernelType.IntraNode, 80, 0)),
        (True, (EpDispatchCombineKernelType.InterNodeV1, 32, 16)),
    ],
)
def test_the_table_of_aiters_guide(internode, launch):
    kernel_type, block_num, rdma_block_num = launch
    assert config_from_handle_kwargs(handle_kwargs(), internode) == EpDispatchCombineConfig(
        data_type=torch.float8_e4m3fn,
        rank=3,
        world_size=8,
        hidden_dim=7168,
        scale_dim=56,
        scale_type_size=4,
        max_token_type_size=2,
        max_num_inp_token_per_rank=4096,
        num_experts_per_rank=32,
        num_experts_per_token=8,
        warp_num_per_block=16,
        block_num=block_num,
        kernel_type=kernel_type,
        gpu_per_node=8,
        rdma_block_num=rdma_block_num,
        quant_type="none",
        combine_dtype=torch.bfloat16,
    )


@pytest.mark.parametrize(("internode", "gpu_per_node"), [(False, 16), (True, 8)])
def test_optional_kwargs_have_defaults(internode, gpu_per_node):
    given = handle_kwargs(num_ep_ranks=16, gpu_per_node=..., scale_dim=..., scale_type_size=..., quant_dtype=None)
    config = config_from_handle_kwargs(given, internode)
    assert (config.gpu_per_node, config.scale_dim, config.scale_type_size) == (gpu_per_node, 0, 0)
    assert (config.data_type, config.combine_dtype, config.quant_type) == (torch.bfloat16, None, "none")


@pytest.mark.parametrize("field", ["quant_type", "dispatch_quant_type"])
def test_a_cast_inside_dispatch_takes_tokens_of_the_input_dtype(field):
    config = config_from_handle_kwargs(handle_kwargs(**{field: "fp8_per_1x128"}), False)
    assert (config.data_type, config.wire_dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    assert (config.num_scales, config.combined_dtype) == (56, torch.bfloat16)
    with pytest.raises(ConfigError, match="quant_dtype"):
        config_from_handle_kwargs(handle_kwargs(quant_type="fp8_per_token", quant_dtype=torch.bfloat16), False)
    with pytest.raises(UnknownNameError, match="quant_type"):
        config_from_handle_kwargs(handle_kwargs(quant_type="int3"), False)


def test_our_own_kwargs_are_passed_through():
    extra = {
        "layout": "expert_major",
        "timeout_secs": 2.5,
        "first_timeout_secs": 25.0,
        "num_experts": 256,
        "launch": "manual",
        "max_sms": 20,
        "scale_format": "ue8m0",
        "dispatch_quant_type": "fp8_per_1x128",
        "combine_dtype": torch.float16,
        "use_external_inp_buf": False,
        "max_total_recv_tokens": 0,
        "expert_alignment": 1,
        "column_major_scales": True,
        "local_ids": True,
        "flagged_max_tokens": 16,
        "compiled_calls": "serving",
        "chunk_tokens": 32,
        "ring_chunks": 8,
        "internode_transport": "torch.distributed",
        "on_rank_loss": "mask",
        "mask_after_secs": 2.0,
    }
    assert set(extra) == set(EXTRA_KWARGS)
    config = config_from_handle_kwargs(handle_kwargs(scale_dim=0, **extra), False)
    assert {name: getattr(config, name) for name in extra} == extra


SIZES = ("num_ep_ranks", "token_hidden_size", "max_num_tokens_per_dp_rank", "num_experts_per_token")
DTYPES = ("input_dtype", "quant_dtype", "combine_dtype")
WRONG_KWARGS: list[tuple[str, Any, str]] = [
    *((name, -1, f"^expected {name} to be .*; got -1. Correct the handle kwarg.") for name in SIZES),
    *((name, "bfloat16", rf"{name} to be a torch\.dtype") for name in DTYPES),
    *((name, ..., f"none named {name}") for name in REQUIRED_KWARGS),
    ("token_hiden_size", 1, r"got 'token_hiden_size'. Did you mean 'token_hidden_size'\?"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG_KWARGS)
def test_wrong_and_missing_kwargs_are_named(name, value, said):
    kind = UnknownNameError if name == "token_hiden_size" else ConfigError
    with pytest.raises(kind, match=said):
        config_from_handle_kwargs(handle_kwargs(**{name: value}), False)


def test_a_wider_combine_dtype_sizes_the_buffers():
    config = config_from_handle_kwargs(handle_kwargs(combine_dtype=torch.float32), False)
    assert (config.max_token_type_size, config.combined_dtype) == (4, torch.float32)


# --- managers, as the only rank ---


@pytest.fixture(params=list(MANAGERS))
def manager(request, group):
    with MANAGERS[request.param](group) as manager:
        manager.device = "cpu"
        yield manager


def small_kwargs(**changes: Any) -> dict[str, Any]:
    own = {"rank": 0, "num_ep_ranks": 1, "num_local_experts": 4, "token_hidden_size": 128, "gpu_per_node": ...}
    return handle_kwargs(max_num_tokens_per_dp_rank=8, scale_dim=1, num_experts_per_token=2, **own | changes)


def offered_by(method: str) -> list[str]:
    hooks = {
        "get_handle": ("_get_handle", "_make_op"),
        "dispatch": ("_dispatch_rows",),
        "dispatch_router_logits": ("_dispatch_logits",),
    }
    names = (method, *hooks.get(method, ()))
    return [
        backend
        for backend, kind in MANAGERS.items()
        if any(getattr(kind, name) is not getattr(All2AllManagerBase, name) for name in names)
    ]


@pytest.mark.parametrize(
    "method", ["get_handle", "dispatch_router_logits", "dispatch", "combine", "reset", "set_num_sms"]
)
def test_what_a_backend_lacks_names_those_that_have_it(group, method):
    tokens = torch.zeros(1, 16)
    arguments = {
        "get_handle": ({},),
        "dispatch_router_logits": (tokens, tokens),
        "dispatch": (tokens, tokens, tokens),
        "combine": (tokens,),
        "set_num_sms": (8,),
    }
    backends = offered_by(method)
    for kind in (All2AllManagerBase, *MANAGERS.values()):
        if kind.backend not in backends:
            with pytest.raises(UnsupportedError, match=f"{method}.*{kind.backend!r}") as caught:
                getattr(kind(group), method)(*arguments.get(method, ()))
            assert caught.value.remedy.rstrip(".").removeprefix("Use ").replace(" or ", ", ").split(", ") == backends


@pytest.mark.parametrize("name", ["naive", "allgather_reducescatter"])
def test_collectives_refuse_what_they_lack(group, name):
    with MANAGERS[name](group) as manager, pytest.raises(UnsupportedError, match="on_rank_loss 'fail'"):
        manager.get_handle(small_kwargs(layout="rank_major", on_rank_loss="mask"))


def test_a_manager_that_makes_ops_needs_to_say_nothing_more(group):
    class Mine(All2AllManagerBase):
        def _make_op(self, *_: Any) -> Handle:
            return Handle()

    manager = Mine(group)
    manager.device = "cpu"
    op = manager.get_handle(small_kwargs())
    assert manager.handle_cache.handles() == [op]


def test_handles_are_shared_and_closed_with_the_manager(manager):
    op = manager.get_handle(small_kwargs())
    # another way to say the same must not build a second op on the memory of the first
    assert manager.get_handle(dict(reversed(small_kwargs().items()))) is op
    assert manager.get_handle(small_kwargs(layout="compact")) is op  # the default, written out
    assert manager.get_handle(small_kwargs(), 1) is not op
    with pytest.raises(StateError, match="before the first op"):
        manager.device = "cpu"
    arena = getattr(manager, "arena", None)
    manager.destroy()
    manager.close()
    assert arena is None or arena.closed
    assert len(manager.handle_cache) == 0
    for call in (op.check, op.reset):
        with pytest.raises(ClosedError, match="get_handle"):
            call()
    with pytest.raises(ClosedError, match="create_manager"):
        manager.get_handle(small_kwargs())


def use(thing: Any, name: str) -> None:
    """Reads a property, or calls a method with nothing for what it must be given."""
    member = getattr(thing, name)
    if callable(member):
        parameters = inspect.signature(member).parameters.values()
        member(*(None for each in parameters if each.default is each.empty))


def test_nothing_of_a_closed_op_or_manager_works(manager):
    op = manager.get_handle(small_kwargs())
    _ = op.recv_counts  # a property that keeps its value
    things = [(MoriOp.around(manager.get_handle(small_kwargs(), 1)), "op"), (op, "op"), (manager, "manager")]
    stay = {"closed", "close", "destroy", "config", "device"}
    for thing, what in things:
        members = {name: inspect.getattr_static(thing, name) for name in dir(type(thing)) if not name.startswith("_")}
        names = {name for name, member in members.items() if hasattr(type(member), "__get__")}
        thing.close()
        for name in names - stay:
            with pytest.raises(ClosedError, match=f"an open {what}"):
                use(thing, name)
        for name in names & stay:
            use(thing, name)
        assert thing.closed


def test_a_closed_handle_is_made_anew(manager):
    op = manager.get_handle(small_kwargs())
    op.close()
    again = manager.get_handle(small_kwargs())
    assert again is not op
    assert manager.handle_cache.handles() == [again]
    again.check()


def test_a_dispatch_that_is_refused_at_launch_holds_no_memory(group, monkeypatch):
    def refuse(*_: Any) -> None:
        raise StateError("a form of the call that has run before a graph captures it", "its first use")

    tokens, ids = torch.ones(3, 128, dtype=torch.float8_e4m3fn), torch.zeros(3, 2, dtype=torch.int32)
    with NativeAll2AllManager(group) as manager:
        manager.device = "cpu"
        refused, other = manager.get_handle(small_kwargs()), manager.get_handle(small_kwargs(num_local_experts=8))
        with monkeypatch.context() as patched:
            patched.setattr(refused.engine, "dispatch", refuse)
            for call in (refused.dispatch, refused.dispatch_send):
                with pytest.raises(StateError, match="its first use"):
                    call(tokens, torch.ones(3, 2), torch.ones(3, 1), ids)
        for op in (other, refused):
            rows, *_ = op.dispatch(tokens, torch.ones(3, 2), torch.ones(3, 1), ids)
            op.combine(rows.to(torch.bfloat16), None, None)


def test_explain(manager):
    explained = manager.explain()
    assert explained["backend"] == manager.backend
    assert "1 node" in explained["topology"]
    assert set(explained) == {"backend", "kernel", "kernel_reason", "device", "topology"}


def test_every_backend_names_its_kernels_without_its_library():
    managers = {name: registry.manager_type(name) for name in registry.available_backends()}
    kernels = {name: [kind.kernel_for(nodes)[0] for nodes in (1, 2)] for name, kind in managers.items() if kind}
    assert set(kernels) == set(managers)
    assert kernels["mori"] == ["mori IntraNode", "mori InterNodeV1"]
    assert kernels["mori_low_latency"] == ["mori IntraNode", "mori InterNodeV1LL"]
    assert kernels["naive"] == ["torch.distributed"] * 2
    assert kernels["pplx"] == ["pplx_kernels"] * 2


def native_on(group: Any, hosts: str) -> NativeAll2AllManager:
    """A manager whose ranks are on these hosts, a letter each."""
    manager = NativeAll2AllManager(group)
    manager.device = "cpu"
    facts = tuple(RankFacts(hostname=host, boot_id=host) for host in hosts)
    shared = tuple(tuple("" if one == other else "no file" for other in hosts) for one in hosts)
    manager._report = TopologyReport(facts, shared)
    return manager


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aab", "equally many ranks; got .*2 and 1 ranks.*as many ranks on each node"),
        ("abab", "numbered node by node; got .*interleaved.*Number the ranks node by node"),
    ],
)
def test_native_refuses_nodes_that_are_no_grid_and_says_what_to_use(group, hosts, expected):
    manager = native_on(group, hosts)
    with pytest.raises(UnsupportedError, match=rf"{expected}.*allgather_reducescatter"):
        manager.get_handle(small_kwargs())
    for max_tokens, kernel in ((512, "InterNodeV1LL"), (513, "InterNodeV1")):
        explained = manager.explain(max_tokens=max_tokens)
        assert explained["kernel"] == kernel
        assert f"ops of {max_tokens} tokens" in explained["kernel_reason"]
    assert manager.explain()["kernel"] == "InterNodeV1LL or InterNodeV1"
    assert "at most 512 tokens" in manager.explain()["kernel_reason"]
    assert len(manager.handle_cache) == 0


def test_native_refuses_virtual_nodes_that_cannot_be(group):
    manager = native_on(group, "aaaa")
    with pytest.raises(UnsupportedError, match=r"equally many.*gpu_per_node=3.*allgather_reducescatter"):
        manager.get_handle(small_kwargs(gpu_per_node=3))
    with pytest.raises(ConfigError, match="gpu_per_node"):
        manager.get_handle(small_kwargs(gpu_per_node=0))
    assert manager._arena is None


def test_native_remembers_the_bound_on_multiprocessors(group):
    with NativeAll2AllManager(group) as manager:
        manager.device = "cpu"
        op = manager.get_handle(small_kwargs())
        manager.set_num_sms(5)
        assert manager.max_sms_used() == 5
        assert manager.get_handle(small_kwargs()) is op
        own, after = manager.get_handle(small_kwargs(max_sms=4)), manager.get_handle(small_kwargs(), 1)
        for each in (op, own, after):
            # as on a GPU: the interpreter has no multiprocessors
            each.engine.kernels.num_sms = 132
        assert [each.get_launch_config(is_dispatch=True)[0] for each in (op, own, after)] == [5, 4, 5]
        with pytest.raises(ConfigError, match="num_sms"):
            manager.set_num_sms(-1)
        manager.set_num_sms(0)
        unbound = FLAG_PROGRAMS[Phase.LOW_LATENCY_DISPATCH] + 8 + 8
        assert [each.get_launch_config(is_dispatch=True)[0] for each in (op, own, after)] == [unbound, 4, unbound]


@pytest.mark.parametrize("name", ["naive", "allgather_reducescatter"])
def test_collective_dispatch_and_combine_alternate(group, name):
    manager = MANAGERS[name](group)
    tokens, ids = torch.ones(2, 16), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(AlternationError):
        manager.combine(tokens)
    manager.dispatch(tokens, torch.ones(2, 2), ids)
    with pytest.raises(AlternationError, match="reset"):
        manager.dispatch(tokens, torch.ones(2, 2), ids)
    manager.reset()
    manager.dispatch(tokens, torch.ones(2, 2), ids)
    assert torch.equal(manager.combine(tokens), tokens)
