"""The programs that the documents print (tests/seeds), as rank bodies.

A block runs as it is printed, but for REPLACED: devices, sizes, ports, and what it leaves open. Its other names are
given from outside. Sums are compared with those of experts that multiply by 1 + their number.
"""

import importlib
import os
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ep_a2a import compat
from ep_a2a.quantization import quantize_per_1x128, quantize_per_token
from ep_a2a.testing import RankContext

SEEDS = Path(__file__).parents[1] / "seeds"
AITERS_MANAGER = Path(__file__).parents[1] / "engines/atom/shape/aiter/dist/device_communicators/all2all.py"
NUM_TOKENS, HIDDEN_DIM, TOPK, NUM_EXPERTS = (5, 3, 0, 4), 256, 2, 16

REPLACED = {
    "000_complete_example": {
        'os.environ["MASTER_PORT"] = "12355"': 'os.environ["MASTER_PORT"] = port',
        "torch.cuda.set_device(rank)": "",
        "cpu:gloo,cuda:nccl": "cpu:gloo",
        'f"cuda:{rank}"': "device",
        "hidden_dim=7168": "hidden_dim=64",
        "max_num_inp_token_per_rank=4096": "max_num_inp_token_per_rank=16",
        "num_tokens = 128": "num_tokens = 13",
    },
    "001_7_1_ep_group": {"tcp://127.0.0.1:12345": "tcp://127.0.0.1:{port}"},
    "003_usage": {
        "max_m=128": "max_m=8",
        "hidden=7168": f"hidden={HIDDEN_DIM}",
        "topk=8": f"topk={TOPK}",
        "num_experts=256": "num_experts=num_experts",
        "local_world_size=8": "local_world_size=local_world_size",
        "world_size=32": "world_size=world_size",
        "expert_output = ...": "expert_output = expert_ffn(recv_token, recv_scale)",
    },
    "003_profiling": {
        "Layer(...,": "Layer(**layer_arguments,",
        "dispatch(...)": "dispatch(**dispatch_arguments)",
        "combine(...)": "combine(expert_ffn(recv_token, recv_scale), expert_ids, routing_weights, dispatch_meta)",
    },
}


def run_block(name: str, names: dict[str, Any], look: Callable[[], None] | None = None, before: str = "") -> None:
    """Executes a block in `names`; each replacement must be in it. Calls `look` before the line that begins so."""
    text = (SEEDS / f"{name}.txt").read_text("utf-8")
    for printed, ours in REPLACED.get(name, {}).items():
        assert printed in text, f"{name} does not say {printed}"
        text = text.replace(printed, ours.replace("{port}", names.get("port", "")))
    if look is not None:
        text, end = text.split(f"\n{before}")
        exec(compile(text, f"{name}.txt", "exec"), names)
        look()
        text = f"{before}{end}"
    exec(compile(text, f"{name}.txt", "exec"), names)


@contextmanager
def alone(context: RankContext, *libraries: str) -> Iterator[dict[str, Any]]:
    """A process that has joined no group, with libraries installed; the names that every block may use."""
    if dist.is_initialized():
        dist.destroy_process_group()
    compat.install(*libraries)
    try:
        # on a machine with GPUs a test on CPU must say so, and most programs have no word for it
        with mock.patch("torch.cuda.is_available", return_value=context.device.type == "cuda"):
            yield {
                "torch": torch,
                "os": os,
                "rank": context.rank,
                "world_size": context.world_size,
                "device": str(context.device),
            }
    finally:
        compat.uninstall(*libraries)


def join(port: str, context: RankContext) -> None:
    """Makes the default group, which a block takes as given."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=context.rank, world_size=context.world_size)


def own_tokens(context: RankContext) -> dict[str, Any]:
    """Tokens of this rank with routing, under the names that AITER's guide uses; ids as torch.topk makes them."""
    generator = torch.Generator().manual_seed(context.rank)
    num_tokens = NUM_TOKENS[context.rank % len(NUM_TOKENS)]
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK]
    return {
        "tokens": torch.randn(num_tokens, HIDDEN_DIM, generator=generator).bfloat16().to(context.device),
        "topk_weights": torch.rand(num_tokens, TOPK, generator=generator).to(context.device),
        "topk_ids": ids.contiguous().to(context.device),
    }


def scaled(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of fp8 rows."""
    return rows.float() * scales.repeat_interleave(rows.shape[-1] // scales.shape[-1], -1)


def factors(weights: torch.Tensor, ids: torch.Tensor, is_local: torch.Tensor) -> torch.Tensor:
    """What experts multiply a row by: weights times 1 + the expert's number, over experts of the rank."""
    ids = ids.long().clamp(min=0)
    return (weights * (1 + ids) * is_local[ids]).sum(1, keepdim=True)


def check_sums(got: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
    expected = tokens.float() * (weights * (1 + ids)).sum(1, keepdim=True)
    torch.testing.assert_close(got[: len(tokens)].float(), expected, rtol=2e-2, atol=2e-2)


# --- seed 000 ---


def complete_example(context: RankContext, port: str) -> None:
    with alone(context, "mori") as names:
        names["port"] = port

        def look() -> None:
            ids, tokens = names["indices"].cpu(), names["input_tokens"].cpu()
            num_ranks = ((ids // 32)[:, :, None] == torch.arange(context.world_size)).any(1).sum(1, keepdim=True)
            expected = (tokens.float() * num_ranks).bfloat16()
            assert torch.equal(names["combine_output"][: len(tokens)].cpu(), expected)

        run_block("000_complete_example", names, look, before="del op")


# --- seed 001 ---


def guide_names(context: RankContext, quant_type: str) -> dict[str, Any]:
    """What AITER's guide leaves open."""
    kinds = importlib.import_module("aiter").QuantType
    per_rank = NUM_EXPERTS // context.world_size
    given = own_tokens(context) | {
        "quant_type": kinds[quant_type],
        "rank_id": context.rank,
        "hidden_dim": HIDDEN_DIM,
        "max_tokens": 8,
        "E": NUM_EXPERTS,
        "num_experts": NUM_EXPERTS,
        "total_experts": NUM_EXPERTS,
        "topk": TOPK,
        "gpus_per_node": context.world_size,
        "local_start": per_rank * context.rank,
        "local_end": per_rank * (context.rank + 1),
        "num_local_tokens": NUM_TOKENS[context.rank % len(NUM_TOKENS)],
    }
    return given | dict.fromkeys(("w1", "w2", "w1_scale", "w2_scale"))


def fused_moe(
    rows: Any, w1: Any, w2: Any, weights: Any, ids: Any, expert_mask: Any, num_local_tokens: Any, **others: Any
) -> torch.Tensor:
    """The experts of one rank, with AITER's arguments."""
    output = scaled(rows, others["a1_scale"]) * factors(weights, ids, expert_mask)
    output[int(num_local_tokens) :] = 0
    return output.to(others["dtype"])


def open_fused_moe(names: dict[str, Any], result: tuple[str, ...]) -> Any:
    """`fused_moe(...)`, whose arguments the document leaves open: takes what dispatch has put into `result`."""

    def called(*_: Any) -> torch.Tensor:
        got = names[result[0]] if len(result) == 1 else [names[name] for name in result]
        rows, weights, scales, ids, num_rows = got
        mask = torch.zeros(names["E"], device=rows.device)
        mask[names["local_start"] : names["local_end"]] = 1
        return fused_moe(rows, None, None, weights, ids, mask, num_rows, a1_scale=scales, dtype=torch.bfloat16)

    return called


def check_guide(names: dict[str, Any], result: Any) -> None:
    got = result[0] if isinstance(result, tuple) else result
    quantize = quantize_per_token if names["quant_type"].name == "per_Token" else quantize_per_1x128
    rows, scales = quantize(names["tokens"])
    assert torch.equal(rows.view(torch.uint8), names["tokens_qt"].view(torch.uint8))
    check_sums(got, scaled(rows, scales), names["topk_weights"], names["topk_ids"])


def ep_group(context: RankContext, port: str, quant_type: str) -> None:
    """7.1, with the quantisation of 6 and the handle's kwargs of 3."""
    with alone(context, "mori", "aiter") as names:
        names |= guide_names(context, quant_type) | {"port": port}
        run_block("001_6_quantization", names)
        found = names | {"ep_group": mock.MagicMock()}
        run_block("001_3_handle", found)
        names["handle_kwargs"] = found["handle_kwargs"]
        names["fused_moe"] = open_fused_moe(names, ("dispatch_result",))
        run_block(
            "001_7_1_ep_group", names, lambda: check_guide(names, names["result"]), before="aiter.destroy_dist_env"
        )
        assert not dist.is_initialized()


def sections(context: RankContext, port: str, quant_type: str, num_nodes: int = 1) -> None:
    """3 to 4.3 and 8 in the order in which they are printed, also on virtual nodes."""
    with alone(context, "mori", "aiter") as names:
        join(port, context)
        names |= guide_names(context, quant_type)
        names["gpus_per_node"] = context.world_size // num_nodes
        state = importlib.import_module("aiter.dist.parallel_state")
        state.init_dist_env(1, 0, "nccl", data_parallel_size=context.world_size, data_parallel_rank=context.rank)
        names |= {"ep_group": state.get_ep_group(), "fused_moe": fused_moe}
        run_block("001_6_quantization", names)
        run_block("001_3_handle", names)
        kernel = "InterNodeV1" if num_nodes > 1 else "IntraNode"
        assert names["mori_op"].config.kernel_type.name == kernel
        communicator = names["ep_group"].device_communicator
        assert communicator.all2all_backend == "mori"
        # the same by hand, as the guide's table of use cases says, and by a manager that was written for AITER
        managers = importlib.import_module("aiter.dist.device_communicators.all2all")
        cpu_group = names["ep_group"].cpu_group
        assert isinstance(communicator.all2all_manager, managers.MoriAll2AllManager)
        by_hand = managers.MoriAll2AllManager(cpu_group)
        theirs = runpy.run_path(str(AITERS_MANAGER))["MoriAll2AllManager"](cpu_group)
        assert theirs.get_handle(names["handle_kwargs"]) is theirs.get_handle(names["handle_kwargs"])
        for op in (names["mori_op"], *(each.get_handle(names["handle_kwargs"]) for each in (by_hand, theirs))):
            names["mori_op"] = op
            for block in ("4_1_dispatch", "4_2_local_moe", "4_3_combine", "4_3_result"):
                run_block(f"001_{block}", names)
            check_guide(names, names["result"])
        by_hand.destroy()
        theirs.destroy()
        leave_mori("mori")
        names |= {"self": SimpleNamespace(), "cpu_group": cpu_group}
        run_block("001_8_internode", names)
        assert names["self"].internode is False
        state.destroy_dist_env()
        dist.destroy_process_group()


def leave_mori(group_name: str) -> None:
    """Ends the symmetric world, and takes the name that the program gave its group."""
    importlib.import_module("mori").shmem.shmem_finalize()
    torch._C._distributed_c10d._unregister_process_group(group_name)


def direct(context: RankContext, port: str, quant_type: str) -> None:
    """7.2 behind 6, then the op of 3's config."""
    with alone(context, "mori", "aiter") as names:
        join(port, context)
        names |= guide_names(context, quant_type)
        run_block("001_6_quantization", names)
        names["fused_moe"] = open_fused_moe(names, ("out", "weights", "scale", "ids", "recv_num"))
        run_block("001_7_2_direct", names)
        check_guide(names, names["result"])
        config = names["mori_config"]
        of_the_table = (
            "rank world_size data_type hidden_dim scale_dim scale_type_size max_token_type_size "
            "max_num_inp_token_per_rank num_experts_per_rank num_experts_per_token gpu_per_node"
        )
        names["mori_kwargs"] = {name: getattr(config, name) for name in of_the_table.split()} | {
            "warp_num_per_block": 16,
            "block_num": 80,
            "rdma_block_num": 0,
            "kernel_type": names["mori"].ops.EpDispatchCombineKernelType.IntraNode,
        }
        run_block("001_3_config", names)
        assert names["handle"].config.hidden_dim == HIDDEN_DIM
        leave_mori("default")
        dist.destroy_process_group()


# --- seed 003 ---


def low_latency(context: RankContext, port: str, folder: str, num_nodes: int = 1) -> None:
    """The usage example by itself, then in a public program's frame the one with profiling, on equally large nodes."""
    with alone(context, "triton_dist") as names:
        join(port, context)
        given = own_tokens(context)
        per_rank = NUM_EXPERTS // context.world_size

        def expert_ffn(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            experts = per_rank * context.rank + torch.arange(per_rank, device=context.device)[:, None, None]
            return (scaled(rows, scales) * (1 + experts)).bfloat16()

        names |= {
            "num_experts": NUM_EXPERTS,
            "local_world_size": context.world_size // num_nodes,
            "tokens": given["tokens"],
            "expert_ids": given["topk_ids"],
            "routing_weights": given["topk_weights"],
            "expert_ffn": expert_ffn,
        }
        run_block("003_usage", names)
        values = scaled(*quantize_per_1x128(given["tokens"]))
        check_sums(names["combined"], values, given["topk_weights"], given["topk_ids"])
        utils = importlib.import_module("triton_dist.utils")
        utils.finalize_distributed()
        launched = {"RANK": context.rank, "WORLD_SIZE": context.world_size, "LOCAL_RANK": context.rank}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": int(port) + 1}
        with mock.patch.dict(os.environ, {name: str(value) for name, value in (launched | address).items()}):
            group = utils.initialize_distributed()
        assert (group.rank(), group.size()) == (context.rank, context.world_size)
        names["layer_arguments"] = {
            "max_m": 8,
            "hidden": HIDDEN_DIM,
            "topk": TOPK,
            "online_quant_fp8": True,
            "rank": context.rank,
            "num_experts": names["num_experts"],
            "local_world_size": names["local_world_size"],
            "world_size": context.world_size,
        }
        names["dispatch_arguments"] = {
            "send_tokens": given["tokens"],
            "send_scales": None,
            "topk_indices": given["topk_ids"],
        }
        os.chdir(folder)
        run_block("003_profiling", names)
        check_sums(names["combined"], values, given["topk_weights"], given["topk_ids"])
        for phase in ("dispatch", "combine"):
            assert Path(folder, "prof", f"ll_{phase}_RANK_{context.rank}.json").is_file()
        names["layer"].finalize()
        tensor = utils.nvshmem_create_tensor((2, 3), torch.bfloat16)
        utils.nvshmem_barrier_all_on_stream()
        utils.nvshmem_free_tensor_sync(tensor)
        assert utils.is_shmem_initialized()
        utils.finalize_distributed()
        assert not dist.is_initialized()
        assert not utils.is_shmem_initialized()
