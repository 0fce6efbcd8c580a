"""Checks in a real vLLM, in a group of one process: communicators, the manager, and where layers get theirs."""

import contextlib
import inspect
import itertools
import logging
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.engines.vllm.contract.checks import BATCHED, LOGGER, NAME, NAMES, refused, replaced
from tests.engines.vllm.contract.config_checks import chosen
from tests.messages import messages_of

VLLM_BACKEND = "allgather_reducescatter"
EP = "ep:0"
CPU, CUDA = "cpu_communicator.CpuCommunicator", "cuda_communicator.CudaCommunicator"
COMMUNICATORS = "vllm.distributed.device_communicators"
ONE_RANK = SimpleNamespace(rank_in_group=0, world_size=1)


def group() -> Any:
    """A group of this process; vLLM's data- and tensor-parallel groups are stand-ins."""
    import torch.distributed as dist
    from vllm.distributed import parallel_state

    if not dist.is_initialized():
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/meeting")
        parallel_state.get_dp_group = parallel_state.get_tp_group = lambda: ONE_RANK
    return dist.group.WORLD


@contextlib.contextmanager
def communicator_of(
    unique_name: str = EP,
    *,
    ep: bool = True,
    dp: int = 2,
    backend: str = NAME,
    kind: str = CPU,
    num_micro_batches: int = 0,
) -> Iterator[Any]:
    """A communicator made as vLLM's GroupCoordinator makes one of `kind`, by the platform's word."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    config = VllmConfig(parallel_config=chosen(all2all_backend=backend, enable_expert_parallel=ep))
    config.parallel_config.all2all_backend, config.parallel_config.data_parallel_size = backend, dp
    config.parallel_config.ubatch_size = num_micro_batches
    options: dict[str, Any] = {"cpu_group": group(), "device": torch.device("cpu"), "device_group": group()}
    if "use_all2all" in inspect.signature(DeviceCommunicatorBase.__init__).parameters:
        options["use_all2all"] = dp > 1
    wanted = classmethod(lambda _: f"{COMMUNICATORS}.{kind}")
    chosen()  # patches the platform, also where this configuration names another backend
    with replaced(type(current_platform), "get_device_communicator_cls", wanted), set_current_vllm_config(config):
        make = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())
        communicator = make(unique_name=unique_name, **options)
        assert config.parallel_config.all2all_backend == backend
        yield communicator
        communicator.destroy()


def check_the_communicator_of_experts_carries_our_manager() -> None:
    from ep_a2a.integrations.vllm.manager import VllmAll2AllManager

    for kind, name in itertools.product((CPU, CUDA), NAMES):
        module, _, class_of_kind = kind.partition(".")
        theirs = logging.getLogger(f"{COMMUNICATORS}.{module}")
        with messages_of(theirs, logging.INFO) as texts, communicator_of(kind=kind, backend=name) as communicator:
            assert not [text for text in texts if "manager" in text], "the log names one backend"
            assert not theirs.filters
            assert type(communicator).__name__ == class_of_kind
            assert communicator.use_all2all
            assert communicator.all2all_backend == name
            manager = communicator.all2all_manager
            assert type(manager) is VllmAll2AllManager
            assert manager._arena is None, "memory before the first op"
            assert type(manager._vllm_manager).__name__ == "AgRsAll2AllManager"


def check_steps_in_micro_batches_are_known() -> None:
    from vllm.v1.worker.ubatching import UBatchContext

    before = UBatchContext._cpu_yield
    for kind in (CPU, CUDA):
        with communicator_of(kind=kind) as communicator:
            assert communicator.all2all_manager._num_micro_batches == 1
    assert UBatchContext._cpu_yield is before
    for _ in range(2):
        with communicator_of(num_micro_batches=3) as communicator:
            assert communicator.all2all_manager._num_micro_batches == 3
    assert UBatchContext._cpu_yield.__wrapped__ is before, "patched once"


def check_other_communicators_are_the_platforms_own() -> None:
    for kind, name in itertools.product((CPU, CUDA), ("tp:0", "dp:0", "pp:0", "world:0", "eplb:0", "epx:0", "")):
        with communicator_of(name, kind=kind) as communicator:
            assert type(communicator).__name__ == kind.partition(".")[2]
            assert communicator.all2all_manager is None
    with communicator_of(backend=VLLM_BACKEND) as communicator:
        assert type(communicator).__name__ == "CpuCommunicator"
        assert type(communicator.all2all_manager).__name__ == "AgRsAll2AllManager"


def check_without_replicas_or_experts_it_is_the_platforms_own() -> None:
    for ep, dp in itertools.product((False, True), (1, 2)):
        with communicator_of(ep=ep, dp=dp) as communicator:
            theirs = type(communicator.all2all_manager).__name__
            ours = "VllmAll2AllManager" if ep else "AgRsAll2AllManager"
            assert theirs == (ours if dp > 1 else "NoneType")


def check_a_communicator_destroys_its_manager() -> None:
    with communicator_of(kind=CUDA) as communicator:
        manager = communicator.all2all_manager
        communicator.destroy()
        assert manager._closed
        assert communicator.all2all_manager is None


OF_REFUSED_OPTIONS = {"stage_ep_size", "commit_ep_size", "mask_remote_ranks"}
"""vLLM calls these with --enable-elastic-ep."""


def check_the_manager_has_all_that_vllm_asks_of_one() -> None:
    from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

    with communicator_of() as communicator:
        manager = communicator.all2all_manager
        theirs = {name for name, value in vars(All2AllManagerBase).items() if callable(value) and name[0] != "_"}
        assert {name for name in theirs - OF_REFUSED_OPTIONS if not hasattr(manager, name)} == set()
        assert (manager.rank, manager.world_size, manager.dp_rank, manager.dp_world_size) == (0, 1, 0, 1)
        assert manager.dp_group is manager.tp_group is ONE_RANK
        assert manager.cpu_group is group()
        assert not manager.internode
        assert not manager.support_fault_tolerance
        assert (manager.query_active_mask().tolist(), bool(manager.query_fault())) == ([0], False)
        assert manager.max_sms_used() is None


def check_hidden_states_travel_by_vllms_own_manager() -> None:
    """Of layers without a modular kernel, by the communicator's own methods."""
    import torch

    hidden, weights, ids = torch.ones(2, 4), torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    with messages_of(logging.getLogger(LOGGER)) as texts, communicator_of(kind=CUDA) as communicator:
        communicator.all2all_manager._vllm_manager = theirs = mock.Mock()
        communicator.dispatch_router_logits(hidden, weights, True)
        communicator.dispatch(hidden, weights, ids, True)
        communicator.combine(hidden, True)
        assert [name for name, *_ in theirs.method_calls] == ["dispatch_router_logits", "dispatch", "combine"]
        if hasattr(communicator, "combine_into_output"):
            communicator.combine_into_output(hidden, torch.zeros(2, 4), True)
            theirs.combine_into_output.assert_called_once()
        (text,) = [text for text in texts if "modular kernel" in text]
        assert VLLM_BACKEND in text


def check_checkpoints_are_refused() -> None:
    from ep_a2a.errors import UnsupportedError

    with communicator_of(kind=CUDA) as communicator:
        for method in ("checkpoint_prepare", "checkpoint_restore"):
            with refused(UnsupportedError, method):
                # before vLLM 0.27 communicators have no such thing
                getattr(communicator, method, getattr(communicator.all2all_manager, method))()


def moe_of(**changes: Any) -> SimpleNamespace:
    parallel = {"all2all_backend": NAME, "use_all2all_kernels": True, "sp_size": 2}
    parallel |= {"use_batched_activation_format": False} | changes
    return SimpleNamespace(moe_parallel_config=SimpleNamespace(**parallel), max_num_tokens=7)


def check_layers_get_our_prepare_and_finalize() -> None:
    import torch
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.oracle import fp8, unquantized

    with communicator_of() as communicator:
        experts = SimpleNamespace(device_communicator=communicator)
        with replaced(parallel_state, "get_ep_group", lambda: experts):
            for holder in (all2all_utils, unquantized, fp8):
                made = holder.maybe_make_prepare_finalize(moe_of(), None, allow_new_interface=True)
                assert type(made).__name__ == "EpA2APrepareAndFinalize"
            assert made.max_num_tokens_per_rank() == 4
            assert made.num_dispatchers() == 1
            assert made.topk_indices_dtype() is torch.int32
            assert made.activation_format is mk.FusedMoEActivationFormat.Standard
            assert made.output_is_reduced()
            assert not made.supports_async()
            assert made.supports_dbo()
            refusals_when_made(all2all_utils.maybe_make_prepare_finalize)
            batched = moe_of(all2all_backend=BATCHED, use_batched_activation_format=True)
            made = all2all_utils.maybe_make_prepare_finalize(batched, None, allow_new_interface=True)
            assert made.activation_format is mk.FusedMoEActivationFormat.BatchedExperts


def check_experts_are_chosen_by_the_format_of_the_name() -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.platforms import current_platform

    names = (NAME, BATCHED, VLLM_BACKEND, "deepep_low_latency")

    def batched_names(**changes: bool) -> set[str]:
        values = {"use_all2all_kernels": True, "use_deepep_ll_kernels": False, "use_nixl_ep_kernels": False} | changes
        return {name for name in names if format_of(SimpleNamespace(all2all_backend=name, **values))}

    with communicator_of():
        format_of = FusedMoEParallelConfig.use_batched_activation_format.fget
        assert batched_names() == set(), "vLLM has no such experts for CPUs"
        with replaced(current_platform, "is_cpu", lambda: False):
            assert batched_names() == {BATCHED}
            assert batched_names(use_all2all_kernels=False) == set()
            assert batched_names(use_deepep_ll_kernels=True) == set(names), "vLLM's own answer stands"


def refusals_when_made(make: Any) -> None:
    from vllm.distributed import parallel_state

    from ep_a2a.errors import StateError, UnsupportedError
    from ep_a2a.integrations.vllm.communicator import _replacing

    assert type(make(moe_of(), None, None, True)).__name__ == "EpA2APrepareAndFinalize"
    assert make(moe_of(), None) is None, "a method that asks so in vLLM 0.26 would refuse a modular kernel"
    with refused(UnsupportedError, "monolithic", "--moe-backend"):
        make(moe_of(), None, allow_new_interface=True, use_monolithic=True)
    vllms_own = _replacing(lambda moe, quant_config, **_: (moe, quant_config))
    for others in (moe_of(use_all2all_kernels=False), moe_of(all2all_backend=VLLM_BACKEND)):
        assert vllms_own(others, "quant", allow_new_interface=True) == (others, "quant")
    stranger = SimpleNamespace(device_communicator=SimpleNamespace(all2all_manager="another"))
    with (
        replaced(parallel_state, "get_ep_group", lambda: stranger),
        refused(StateError, "got str", "--all2all-backend ep_a2a"),
    ):
        make(moe_of(), None, allow_new_interface=True)
