"""Runs checks in the SGLang that this Python imports, each on two CPU ranks, and writes a report of each.

    python -m tests.engines.sglang.program CHECK...

SGLang's own HookRegistry, ServerArgs, FusedMoE, MoeRunner and DeepEPDispatcher run. Its compiled expert kernels do not:
`experts_in_torch` takes the place of fused_experts. Nor does its scheduler, of which only two methods are hooked.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.nn.functional import silu

from tests.engines.sglang import stand_ins
from tests.engines.vllm.contract.checks import refused, replaced
from tests.engines.vllm.contract.program import POOL_TIMEOUT_SECS, run

WORLD, HIDDEN, INTERMEDIATE, EXPERTS, TOPK, CHUNK = 2, 128, 64, 8, 3, 64
SCALING = 2.5
COUNTS = ((5, 3), (0, 7), (1, 1))
"""Tokens of each rank in each step."""
SCHEDULER = "sglang.srt.managers.scheduler"


def load() -> None:
    """Imports what SGLang's scheduler process has imported when it loads plugins, and a scheduler of two methods."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if "sglang" not in sys.modules:
        stand_ins.install()
    from sglang.srt.layers.moe.fused_moe_triton import layer  # noqa: F401

    methods = {"__init__": lambda self: None, "process_batch_result": lambda self, batch, result: None}
    scheduler: Any = types.ModuleType(SCHEDULER)
    scheduler.Scheduler = type("Scheduler", (), methods)
    sys.modules[SCHEDULER] = sys.modules["sglang.srt.managers"].scheduler = scheduler


def apply_hooks() -> None:
    """What SGLang's load_plugins does."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from ep_a2a.integrations import sglang as integration

    integration.register()
    HookRegistry.apply_hooks()
    missing = HookRegistry._hooks.keys() - HookRegistry._patched
    assert not missing, missing


def settled(**options: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    given = {"model_path": "dummy", "device": "cpu", "tp_size": WORLD, "chunked_prefill_size": CHUNK} | options
    args = ServerArgs(**given)
    args.resolve_once()
    return args


class Group:
    """What is read of SGLang's GroupCoordinator."""

    device = "cpu"

    def __init__(self, group: Any, world_size: int = WORLD) -> None:
        self.cpu_group = self.device_group = group
        self.world_size = world_size


def configure(backend: str, **options: Any) -> None:
    """Publishes SGLang's configuration, and a group of the two ranks as its tensor-parallel one."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.moe import initialize_moe_config

    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    args = settled(moe_a2a_backend=backend, ep_size=WORLD, attn_dp_size=WORLD, **options)
    runtime_context.publish(args, role="scheduler")
    initialize_moe_config()
    parallel_state._TP = Group(group)
    places = {"tp_rank": rank, "moe_ep_rank": rank, "moe_tp_rank": 0, "attn_tp_rank": 0, "attn_dp_rank": rank}
    groups = {"tp_group": parallel_state._TP, "attn_tp_group": Group(None, world_size=1)}
    runtime_context.get_parallel().override_permanently(**groups, **places)


def experts_in_torch(**call: Any) -> torch.Tensor:
    """What SGLang's fused_experts returns: a weighted sum for each row; -1 in a slot is no expert of this rank."""
    rows, (weights, ids, _) = call["hidden_states"], call["topk_output"]
    out = torch.zeros_like(rows)
    for expert, (w13, w2) in enumerate(zip(call["w1"], call["w2"])):
        gate, up = (rows.float() @ w13.float().T).chunk(2, 1)
        weight = torch.where(ids == expert, weights, 0).sum(1, keepdim=True)
        out += (weight * (silu(gate) * up @ w2.float().T)).to(rows.dtype)
    return out * (call["moe_runner_config"].routed_scaling_factor or 1.0)


def a_layer(placed: Sequence[int] = range(EXPERTS), **options: Any) -> Any:
    """SGLang's layer with this rank's part of the experts that are placed; its method takes the path of GPUs."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    options = {"top_k": TOPK, "params_dtype": torch.float32} | options
    layer = FusedMoE(len(placed), HIDDEN, INTERMEDIATE, 0, **options)
    layer.quant_method._forward_method = layer.quant_method.forward_cuda
    layer.w13_weight.data, layer.w2_weight.data = weights_of_this_rank(placed)
    return layer


def weights_of_all() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    return tuple(torch.randn(shape, generator=generator) / 8 for shape in shapes)  # type: ignore[return-value]


def weights_of_this_rank(placed: Sequence[int] = range(EXPERTS)) -> list[torch.Tensor]:
    return [each[list(placed)].chunk(WORLD)[torch.distributed.get_rank()] for each in weights_of_all()]


def routed(num_tokens: int, seed: int) -> tuple[torch.Tensor, Any]:
    """Tokens of this rank with a router's choice; the last slot of the first one is dropped, as SGLang's padding is."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    generator = torch.Generator().manual_seed(seed * WORLD + torch.distributed.get_rank())
    logits = torch.randn(num_tokens, EXPERTS, generator=generator)
    weights, ids = (logits.softmax(1) * SCALING).topk(TOPK)
    ids[:1, -1] = -1
    return torch.randn(num_tokens, HIDDEN, generator=generator), StandardTopKOutput(weights, ids.int(), logits)


def weighted_experts(rows: torch.Tensor, topk_output: Any, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    config = SimpleNamespace(routed_scaling_factor=None)
    w1, w2 = weights
    return experts_in_torch(hidden_states=rows, topk_output=topk_output, w1=w1, w2=w2, moe_runner_config=config)


def dense(tokens: torch.Tensor, topk_output: Any) -> torch.Tensor:
    return weighted_experts(tokens, topk_output, weights_of_all())


def a_step(counts: Sequence[int], seed: int) -> tuple[torch.Tensor, Any]:
    """Begins a step with so many tokens on each rank; returns those of this rank, as `routed`."""
    from sglang.srt.layers.dp_attention import set_dp_buffer_len

    num_tokens = counts[torch.distributed.get_rank()]
    set_dp_buffer_len(sum(counts), num_tokens, False, list(counts))
    return routed(num_tokens, seed)


def rounded_to_fp8(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [T, 128] as they are after a cast with a scale for 128 elements."""
    scales = tokens.float().abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (tokens / scales).to(torch.float8_e4m3fn).float() * scales


def batched_experts_of_this_rank(sent: Any) -> torch.Tensor:
    """What SGLang's masked products return for rows [E, R, H]: unweighted, anything past each expert's rows."""
    rows = sent.hidden_states.float()
    if sent.hidden_states_scale is not None:
        rows *= sent.hidden_states_scale.repeat_interleave(128, -1)
    out = torch.full_like(rows, torch.nan, dtype=torch.bfloat16)
    for expert, (count, w1, w2) in enumerate(zip(sent.masked_m.tolist(), *weights_of_this_rank())):
        gate, up = (rows[expert, :count] @ w1.T).chunk(2, 1)
        out[expert, :count] = (silu(gate) * up @ w2.T).bfloat16()
    return out


def check_layers_against_the_dense_layer() -> None:
    """Two layers share an op; steps differ in tokens; a rank brings none; the factor is in the router's weights."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    from ep_a2a.errors import CapacityError
    from ep_a2a.kernels.layout import FailureCode
    from ep_a2a.ops.memory import RANK_BITS

    apply_hooks()
    configure("ep_a2a")
    layers = [a_layer(routed_scaling_factor=SCALING) for _ in range(2)]
    first, second = (layer.dispatcher._exchanges[0].op for layer in layers)
    assert first is second
    # EPLB: the model's experts 1 and 4 have two copies, of which ranks take different ones; the last one drops a slot
    placed = a_layer((4, 1, 2, 3, 0, 5, 6, 7, 1, 4))
    copies = torch.tensor([[4, 1, 2, 3, 0, 5, 6, 7, -1], [4, 8, 2, 3, 9, 5, 6, 7, -1]], dtype=torch.int32)
    sys.modules[SCHEDULER].Scheduler()  # type: ignore[attr-defined]
    rank = torch.distributed.get_rank()
    sent: list[Any] = []
    streamer = SimpleNamespace(is_generation=True, _stream_output_generation=lambda *each: sent.append(each))
    num_rows: list[int] = []

    def experts(**call: Any) -> torch.Tensor:
        num_rows.append(len(call["hidden_states"]))
        return experts_in_torch(**call)

    with replaced(fused_moe, "fused_experts", experts):
        for seed, counts in enumerate(COUNTS):
            tokens, topk_output = a_step(counts, seed)
            for layer in layers:
                result = layer(tokens.clone(), topk_output)
                torch.testing.assert_close(result, dense(tokens, topk_output), rtol=1e-4, atol=1e-4)
            SchedulerOutputStreamer.stream_output(streamer, [], False)
            sys.modules[SCHEDULER].Scheduler().process_batch_result(None, None)  # type: ignore[attr-defined]
            mapped = topk_output._replace(topk_ids=copies[rank][topk_output.topk_ids])
            torch.testing.assert_close(placed(tokens, mapped), result, rtol=1e-4, atol=1e-4)
        with refused(ValueError, "at most 4096 tokens", "--chunked-prefill-size"):
            layers[0](*a_step((4500, 4500), 0))
    assert len(sent) == len(COUNTS)
    # as many as all ranks' tokens
    assert num_rows == [8] * 3 + [7] * 3 + [2] * 3
    # no kernel of this rank sees the failure: ranks of one attention group must ask
    first.memory.poison.word.fill_(FailureCode.CAPACITY << RANK_BITS | 1 - rank)
    SchedulerOutputStreamer.stream_output(streamer, [], False)
    get_attn_tp_group().world_size = WORLD
    with refused(CapacityError, f"rank {1 - rank}"):
        SchedulerOutputStreamer.stream_output(streamer, [], False)
    assert len(sent) == len(COUNTS) + 1


def check_two_batch_overlap() -> None:
    """SGLang's stages of Qwen3-MoE run two halves of a step in turn; ranks split their tokens at different places."""
    from sglang.srt.batch_overlap import operations
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.models.qwen3_moe import Qwen3MoeSparseMoeBlock as Block

    apply_hooks()
    configure("ep_a2a", enable_two_batch_overlap=True)
    block = SimpleNamespace(experts=a_layer(), ep_size=WORLD, layer_id=0)
    tokens, choice = a_step((9, 4), 0)
    sizes = [(7, 2), (2, 2)][torch.distributed.get_rank()]

    def begin(state: Any, half: int, forward_batch: Any) -> dict[str, Any]:
        of_half = [each.split(sizes)[half].clone() for each in (tokens, choice.topk_weights, choice.topk_ids)]
        state.hidden_states_mlp_input, state.topk_output = of_half[0], choice._make([*of_half[1:], None])
        state.tbo_subbatch_index = half
        return {}

    names = ("op_dispatch_a", "", "op_dispatch_b", "op_experts", "op_combine_a", "", "op_combine_b")
    stages: list[Any] = [begin]
    stages += [
        functools.partial(getattr(Block, name), block) if name else operations.YieldOperation() for name in names
    ]
    stages.append(lambda state: state.hidden_states_after_combine)
    inputs = [{"half": half, "forward_batch": MagicMock(global_num_tokens_cpu=None)} for half in range(2)]
    with replaced(fused_moe, "fused_experts", experts_in_torch), forward_context(ForwardContext(attn_backend=None)):
        results = operations.execute_overlapped_operations(inputs, [stages] * 2, [0, 0])
    torch.testing.assert_close(torch.cat(results), dense(tokens, choice), rtol=1e-4, atol=1e-4)


def check_small_steps_by_expert() -> None:
    """SGLang's masked products get each expert's rows, with and without a cast; large steps its standard format."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe.moe_runner import deep_gemm
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    def products(core: Any, given: Any, *_: Any, **__: Any) -> Any:
        assert (given.use_masked_gemm, given.hidden_states.shape[1], given.expected_m in (1, 4, 6)) == (True, 128, True)
        rows = batched_experts_of_this_rank(given)
        deep_gemm.dispose_tensor(given.hidden_states)
        return deep_gemm.DeepGemmRunnerOutput(rows)

    apply_hooks()
    configure("ep_a2a_low_latency")
    with envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.override(8):
        raw, cast = (a_layer(params_dtype=torch.bfloat16) for _ in range(2))
        cast.dispatcher.batch_small_steps(casts=True)
    for seed, counts in enumerate([*COUNTS, (65, 2), (5, 3)]):
        tokens, topk_output = a_step(counts, seed)
        tokens = tokens.bfloat16()
        for layer in (raw, cast):
            is_cast = layer is cast and max(counts) <= 64
            if max(counts) <= 64:
                with replaced(deep_gemm.DeepGemmRunnerCore, "run", products):
                    result = layer(tokens.clone(), topk_output)
            else:
                sent = layer.dispatcher.dispatch(tokens, topk_output)
                rows = weighted_experts(sent.hidden_states, sent.topk_output, weights_of_this_rank())
                result = layer.dispatcher.combine(StandardCombineInput(rows))
            expected = dense(rounded_to_fp8(tokens) if is_cast else tokens.float(), topk_output).bfloat16()
            # the experts' rows, of up to 10, are rounded before they are weighed
            torch.testing.assert_close(result, expected, rtol=2e-2, atol=5e-2)


def check_runners() -> None:
    """Expert kernels that take global ids, or that nobody knows, are refused with the layer."""
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    from ep_a2a.errors import UnsupportedError

    apply_hooks()
    configure("ep_a2a")
    for backend, named in ((MoeRunnerBackend.FLASHINFER_CUTLASS, "flashinfer_cutlass"), (None, "another one")):
        made = {"runner": backend and SimpleNamespace(runner_backend=backend), "_aiter_runner": None}
        make: Any = lambda method, *_, made=made: vars(method).update(made)  # noqa: E731
        remedy = "--moe-runner-backend triton"
        with replaced(UnquantizedFusedMoEMethod, "create_moe_runner", make), refused(UnsupportedError, named, remedy):
            a_layer()


def check_deepep_where_it_is_absent() -> None:
    """SGLang's own DeepEP dispatcher on our Buffer, in both modes, against the dense layer."""
    apply_hooks()
    configure("deepep")
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.utils import dispose_tensor

    assert not deepep.use_deepep
    properties = SimpleNamespace(multi_processor_count=132)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (deepep.deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True),
            (deepep, "_is_mnnvl_fabric_supported", lambda: False),
            (deepep, "_deepep_precompile_tp_barrier", lambda: None),
            (deepep, "get_cuda_version", lambda: (13, 0)),
            (torch.cuda, "get_device_properties", lambda device: properties),
        ):
            stack.enter_context(replaced(owner, name, value))
        dispatcher = a_layer(params_dtype=torch.bfloat16).dispatcher
        assert deepep.Buffer.__module__.startswith("ep_a2a.")
        (inner,) = dispatcher._inners
        inner._normal_dispatcher.use_fp8 = False
        for seed, (is_prefill, is_fp8) in enumerate(((1, 0), (0, 1), (0, 0), (1, 0))):
            inner._low_latency_dispatcher.use_fp8 = is_fp8
            stack.enter_context(replaced(deepep, "get_is_extend_in_batch", lambda now=is_prefill: now))
            tokens, topk_output = routed(5 - torch.distributed.get_rank(), seed)
            tokens = tokens.bfloat16()
            sent = dispatcher.dispatch(hidden_states=tokens, topk_output=topk_output)
            assert sent.format.is_deepep_ll() == (not is_prefill)
            if is_prefill:
                choice = sent.topk_weights, sent.topk_ids, None
                rows = weighted_experts(sent.hidden_states, choice, weights_of_this_rank())
            else:
                rows = batched_experts_of_this_rank(sent)
            # as SGLang's DeepGEMM runner does
            dispose_tensor(sent.hidden_states)
            answer = deepep.DeepEPNormalCombineInput if is_prefill else deepep.DeepEPLLCombineInput
            result = dispatcher.combine(combine_input=answer(rows, sent.topk_ids, sent.topk_weights))
            expected = dense(rounded_to_fp8(tokens) if is_fp8 else tokens.float(), topk_output).bfloat16()
            torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def check_options() -> None:
    """The choice on the command line; what the backend sets; what it refuses, each in one line with a remedy."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.moe.moe_runner.base import FusedOpPool
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.server_args import ServerArgs

    from ep_a2a.errors import UnsupportedError
    from ep_a2a.integrations.sglang import plugin

    apply_hooks()
    # another plugin's backend may have the member, too
    for name in (None, "ep_a2a"):
        member = MoeA2ABackend(name or "customized")
        assert (member, member.is_flashinfer()) == (MoeA2ABackend.CUSTOMIZED, name is not None)
        function = FusedOpPool.get_fused_func("customized", "triton")
        assert (function is not None) == (name is not None)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(["--model-path", "dummy", "--moe-a2a-backend", "ep_a2a", "--tp-size", "4"])
    args = ServerArgs.from_cli_args(given)
    args.resolve_once()
    assert (args.ep_size, args.disable_shared_experts_fusion) == (4, True)
    assert settled(moe_a2a_backend="ep_a2a_low_latency").moe_runner_backend == "deep_gemm"
    other = settled(moe_a2a_backend="none")
    assert (other.ep_size, other.disable_shared_experts_fusion) == (1, False)
    fields = {"moe_a2a_backend": "ep_a2a", "moe_runner_backend": "auto", "chunked_prefill_size": None, "pp_size": 1}
    for field in plugin.UNSUPPORTED:
        with refused(UnsupportedError, plugin._option(field)):
            plugin._settle(SimpleNamespace(**fields, **{field: True}))
    with replaced(plugin, "find", lambda *_: None), refused(UnsupportedError, "--enable-eplb before SGLang 0.5.23"):
        plugin._settle(SimpleNamespace(**fields, enable_eplb=True))
    for options, part in (
        ({"moe_runner_backend": "flashinfer_cutlass"}, "--moe-runner-backend"),
        ({"chunked_prefill_size": -1}, "--chunked-prefill-size"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_waterfill": True}, "--enable-waterfill"),
        ({"enable_prefill_cp": True}, "--enable-prefill-cp"),
    ):
        with refused(UnsupportedError, part):
            settled(moe_a2a_backend="ep_a2a", **options)
    settled(moe_a2a_backend="ep_a2a")
    known, unknown = (
        SimpleNamespace(hf_config=SimpleNamespace(architectures=[f"{name}ForCausalLM"]))
        for name in ("Qwen3Moe", "SarvamMoE")
    )
    plugin._check_family(None, known)
    with refused(UnsupportedError, "SarvamMoEForCausalLM"):
        plugin._check_family(None, unknown)
    assert ModelConfig.__init__.__wrapped__ is not None


CHECKS = {name.removeprefix("check_"): each for name, each in dict(globals()).items() if name.startswith("check_")}


def on_two_ranks(name: str) -> None:
    """Forks the ranks: SGLang's imports take half a minute."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, context.Pool(WORLD) as pool:
        ended = pool.imap_unordered(functools.partial(_run, name, folder), range(WORLD))
        # the first error is raised; the other rank may wait for this one, and is killed
        for _ in range(WORLD):
            ended.next(POOL_TIMEOUT_SECS)


def _run(name: str, folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        CHECKS[name]()
    except BaseException:  # noqa: BLE001 - whatever it is, it is the check's outcome, as text that can be pickled
        raise AssertionError(f"rank {rank}: {traceback.format_exc()}") from None


if __name__ == "__main__":
    load()
    run(on_two_ranks, sys.argv[1:])
