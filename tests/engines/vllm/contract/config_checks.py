"""Checks in a real vLLM: the name, the configuration of a user who did not choose it, and then of one who did."""

import contextlib
import copy
import dataclasses
import itertools
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

from tests.engines.vllm.contract import checks
from tests.engines.vllm.contract.wheels import ROOT
from tests.messages import messages_of


def chosen(**options: Any) -> Any:
    from vllm.config import ParallelConfig

    from ep_a2a.integrations.vllm import register

    register()
    return ParallelConfig(**{"all2all_backend": checks.NAME, "enable_expert_parallel": True} | options)


def check_the_names_are_added_once() -> None:
    from vllm.config import ParallelConfig, parallel
    from vllm.engine import arg_utils

    from ep_a2a.integrations.vllm import register

    before = get_args(parallel.All2AllBackend)
    assert checks.NAME not in arg_utils.get_kwargs(ParallelConfig)["all2all_backend"]["choices"]
    register()
    post_init = ParallelConfig.__post_init__
    register()
    assert get_args(parallel.All2AllBackend) == (*before, *checks.NAMES)
    assert ParallelConfig.__post_init__ is post_init
    with checks.refused(ValueError, "Input should be", "'allgather_reducescatter'", f"'{checks.NAME}'"):
        ParallelConfig(all2all_backend="bogus")


def check_nothing_else_changes_for_a_user_who_does_not_choose() -> None:
    from vllm.config import ParallelConfig, VllmConfig

    with messages_of(logging.getLogger(checks.LOGGER), logging.WARNING) as texts:
        for backend in ("allgather_reducescatter", "deepep_low_latency"):
            parallel = ParallelConfig(all2all_backend=backend, enable_expert_parallel=True)
            assert type(VllmConfig(parallel_config=parallel).parallel_config) is ParallelConfig
            assert type(pickle.loads(pickle.dumps(parallel))) is ParallelConfig
    assert texts == []
    assert checks.our_modules() == {"common", "plugin"}
    assert "torch" not in vars(sys.modules["ep_a2a.integrations.vllm.plugin"])
    from tests.engines.vllm.contract.patch_registry import PATCHES

    changed = {patch.name for patch in PATCHES if patch.name != "backend-name" and checks.is_patched(patch.target)}
    assert changed == {"chosen-config"}, changed


def parsed(*arguments: str) -> Any:
    """What vLLM reads from a command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs, FlexibleArgumentParser

    from ep_a2a.integrations.vllm import register

    register()
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(arguments))


def check_the_command_line_takes_the_names() -> None:
    for name in checks.NAMES:
        assert parsed("--all2all-backend", name, "--enable-expert-parallel").all2all_backend == name
    assert parsed().all2all_backend == "allgather_reducescatter"
    with checks.refused(SystemExit, "2"):
        parsed("--all2all-backend", "bogus")


def check_the_files_for_its_command_line_are_taken() -> None:
    files = ROOT / "configs/vllm"
    given = {path.stem: parsed("--config", str(path)) for path in files.glob("*.yaml")}
    assert {"single_node", "two_nodes"} <= set(given)
    for each in given.values():
        assert (each.all2all_backend, each.enable_expert_parallel) == (checks.NAME, True)
    first = given["two_nodes"]
    assert first.data_parallel_size == 2 * first.data_parallel_size_local == 16
    second = parsed("--config", str(files / "two_nodes.yaml"), "--data-parallel-start-rank", "8")
    assert second.data_parallel_start_rank == first.data_parallel_size_local
    assert second.data_parallel_address == first.data_parallel_address


def check_a_vllm_that_lacks_names_is_refused() -> None:
    """Where a configuration is made, before processes are started; copies of it are not checked again."""
    from vllm.config import ParallelConfig

    from ep_a2a.errors import UnsupportedError
    from ep_a2a.integrations.vllm import support

    support.check.cache_clear()
    with checks.replaced(support, "problems", lambda: ["vllm/a.py has no f"]):
        ParallelConfig(enable_expert_parallel=True)
        with checks.refused(
            UnsupportedError, support.SUPPORTED, support.vllm_version(), "vllm/a.py has no f", "EP_A2A_ANY_VLLM=1"
        ):
            chosen()
        with mock.patch.dict(os.environ, EP_A2A_ANY_VLLM="1"):
            config = chosen()
        support.check.cache_clear()
        dataclasses.replace(config)
    support.check.cache_clear()
    chosen()


def check_the_configuration_answers_as_for_backends_of_vllm() -> None:
    """Whether tensor-parallel ranks bring distinct tokens is a list of names in vLLM."""
    from vllm.config import ParallelConfig

    likes = {checks.NAME: "allgather_reducescatter", checks.BATCHED: "deepep_low_latency"}
    for (name, like), ep, tp, dp in itertools.product(likes.items(), (False, True), (1, 2), (1, 2)):
        ours, theirs = chosen(all2all_backend=name), ParallelConfig(all2all_backend=like)
        assert isinstance(ours, ParallelConfig)
        for config in (ours, theirs):
            config.enable_expert_parallel, config.tensor_parallel_size, config.data_parallel_size = ep, tp, dp
        assert ours.use_sequence_parallel_moe == theirs.use_sequence_parallel_moe == (ep and tp == dp == 2)
        assert ours.use_batched_dp_moe == theirs.use_batched_dp_moe == (name == checks.BATCHED and ep and dp == 2)
        if hasattr(theirs, "use_all2all"):
            assert ours.use_all2all == theirs.use_all2all == (dp == 2)


def check_copies_of_the_configuration_stay_what_they_are() -> None:
    from vllm.config import ParallelConfig, VllmConfig

    config = chosen()
    copies = [
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        dataclasses.replace(config),
        chosen(),
    ]
    for each in copies:
        assert type(each) is type(config)
        assert type(each) is not ParallelConfig
        assert each.all2all_backend == checks.NAME
        assert each.compute_hash() == config.compute_hash()
    assert copies[2] == config
    assert config.compute_hash() != ParallelConfig(enable_expert_parallel=True).compute_hash()
    changed = dataclasses.replace(config, enable_expert_parallel=False)
    assert (type(changed), changed.enable_expert_parallel) == (type(config), False)
    assert VllmConfig(parallel_config=config).parallel_config is config


def check_a_fresh_process_is_activated_by_the_configuration() -> None:
    """As vLLM's engine and workers are: they unpickle the configuration before any plugin is loaded."""
    from vllm.config import VllmConfig

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.pickle"
        path.write_bytes(pickle.dumps(VllmConfig(parallel_config=chosen(data_parallel_size=2))))
        program = f"from {__name__} import unpickle; unpickle({str(path)!r})"
        subprocess.run([sys.executable, "-c", program], check=True)


def unpickle(path: str) -> None:
    """The fresh process."""
    checks.use_cpu()
    import vllm.config
    from vllm.platforms import current_platform

    assert not checks.our_modules()
    assert not vars(current_platform)
    config = pickle.loads(Path(path).read_bytes())
    assert type(config) is vllm.config.VllmConfig
    assert config.parallel_config.all2all_backend == checks.NAME
    assert {"get_device_communicator_cls", "check_and_update_config"} <= set(vars(current_platform))
    from ep_a2a.integrations.vllm import register

    register()
    assert type(dataclasses.replace(config.parallel_config)) is type(config.parallel_config) is type(chosen())


def check_the_platform_is_patched_once() -> None:
    from vllm.platforms import current_platform

    from ep_a2a.integrations.vllm.communicator import original_communicator_class
    from ep_a2a.integrations.vllm.parallel_config import COMMUNICATOR_FACTORY

    chosen()
    before = dict(vars(current_platform))
    chosen()
    assert vars(current_platform) == before
    assert current_platform.get_device_communicator_cls() == COMMUNICATOR_FACTORY
    assert original_communicator_class().__name__ == "CpuCommunicator"


def config_of(**parallel: Any) -> SimpleNamespace:
    """As much of a configuration as our check of options looks at."""
    values = {
        "all2all_backend": checks.NAME,
        "enable_expert_parallel": True,
        "data_parallel_size": 2,
        "data_parallel_rank": 0,
    }
    values |= {"prefill_context_parallel_size": 1, "enable_elastic_ep": False}
    values |= {"use_ubatching": False, "distributed_executor_backend": "mp"}
    given = SimpleNamespace(**values | parallel)
    return SimpleNamespace(parallel_config=given, lora_config=None)


REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--enable-elastic-ep", {"enable_elastic_ep": True}),
    ("--prefill-context-parallel-size", {"prefill_context_parallel_size": 2}),
    ("--enable-dbo with --enable-lora", {"use_ubatching": True}),
)
"""Options, and what they are in vLLM's ParallelConfig."""


def check_options_that_cannot_work_are_refused() -> None:
    """Before processes start; without experts on several ranks vLLM's own backend takes them."""
    from vllm.platforms import current_platform

    from ep_a2a.errors import UnsupportedError
    from ep_a2a.integrations.vllm.parallel_config import check_options

    chosen()
    check_options(config_of())
    for option, parallel in REFUSED:
        first, _, second = option.partition(" with ")
        config = config_of(**parallel)
        if second:
            # one of the two options alone
            check_options(config)
        config.lora_config = object()
        leave = f"Leave {first} or {second} out." if second else f"Leave {first} out, or use --all2all-backend"
        with checks.refused(UnsupportedError, f"no {option}", leave):
            current_platform.check_and_update_config(config)
        config.parallel_config.data_parallel_size = 1
        # also of one replica, to which the first options add ranks
        with contextlib.nullcontext() if second else checks.refused(UnsupportedError, f"no {option}"):
            check_options(config)
        config.parallel_config.data_parallel_size = 2
        config.parallel_config.all2all_backend = checks.NAME
        config.parallel_config.enable_expert_parallel = False
        check_options(config)
        assert config.parallel_config.all2all_backend == "allgather_reducescatter"


def check_it_is_said_once_where_the_backend_has_no_effect() -> None:
    from vllm.config import VllmConfig

    from ep_a2a.integrations.vllm import common
    from ep_a2a.integrations.vllm.parallel_config import ON_CPU, ONE_REPLICA, WITHOUT_EP

    said: dict[tuple[str, bool, int], list[str]] = {}
    for name, ep, size in itertools.product(checks.NAMES, (False, True), (1, 2)):
        common.log_once.cache_clear()
        with messages_of(logging.getLogger(checks.LOGGER), logging.WARNING) as said[name, ep, size]:
            for _ in range(2):
                config = chosen(all2all_backend=name, enable_expert_parallel=ep, data_parallel_size=size)
                VllmConfig(parallel_config=config)
    for name, where_it_travels in ((checks.NAME, []), (checks.BATCHED, [ON_CPU])):
        assert [said[name, ep, 1] for ep in (False, True)] == [[ONE_REPLICA]] * 2
        assert [said[name, ep, 2] for ep in (False, True)] == [[WITHOUT_EP], where_it_travels]
    for flag in ("--data-parallel-size", "--enable-expert-parallel", "--all2all-backend ep_a2a"):
        assert flag in ONE_REPLICA
    assert "--enable-expert-parallel" in WITHOUT_EP
    assert "allgather_reducescatter" in WITHOUT_EP


def check_a_variable_that_cannot_be_read_is_refused() -> None:
    from vllm.config import VllmConfig

    for name in ("EP_A2A_TIMEOUT_SECS", "EP_A2A_ANY_VLLM"):
        with mock.patch.dict(os.environ, {name: "abc"}):
            with checks.refused(ValueError, name, "'abc'"):
                VllmConfig(parallel_config=chosen())
            VllmConfig()


def check_vllm_splits_steps_with_our_names() -> None:
    """By ubatch_size, since --enable-dbo is switched off on CPU. Otherwise vLLM asserts that it knows the name."""
    from vllm.config import VllmConfig

    def config_of_two(**options: Any) -> Any:
        given = chosen(ubatch_size=2, data_parallel_size=2, **options)
        try:
            VllmConfig(parallel_config=given)
        except AttributeError as error:
            # up to vLLM 0.32 a model's field is set behind the check of the name, and here is none
            if error.name != "disable_cascade_attn":
                raise
        return given

    for name in checks.NAMES:
        parallel = config_of_two(all2all_backend=name)
        assert parallel.all2all_backend == name
        assert (parallel.use_ubatching, parallel.num_ubatches) == (True, 2)
    with checks.refused(ValueError, "allgather_reducescatter is not supported"):
        config_of_two(enable_expert_parallel=False)
