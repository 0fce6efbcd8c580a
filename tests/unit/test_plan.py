"""`ep-a2a plan`: keys of model families, what travels, refusals, and what is printed. Sizes: multiprocess/test_plan."""

import json
import re
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ep_a2a.cli import app
from ep_a2a.commands.plan.command import plan_op
from ep_a2a.commands.plan.model import model_of, read_model
from ep_a2a.commands.plan.sizes import RINGS_ASSUMED, plan_of
from ep_a2a.commands.plan.vllm import VllmOptions, assumptions, vllm_configs, vllm_plan
from ep_a2a.errors import ConfigError, TopKError, UnsupportedError
from tests.cases.tables import read_json
from tests.unit.test_layout import every_config

BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FLOAT8 = {"num_bits": 8, "type": "float"}
GROUP = {
    "targets": ["Linear"],
    "weights": {**FLOAT8, "strategy": "channel", "dynamic": False},
    "input_activations": {**FLOAT8, "strategy": "token", "dynamic": True},
}
PER_TOKEN_FP8 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}
DEEPSEEK = {"n_routed_experts": 256, "num_experts_per_tok": 8, "hidden_size": 7168, "model_type": "deepseek_v3"}
TABLES = read_json("models")
FAMILIES = TABLES["families"]
"""By name: where the numbers are from (of published models: their config.json, or the defaults of that release, which
are this model's), a config.json with what a plan reads, hidden size, experts, top k and cast of the op for it, and
whether tensor-parallel ranks share tokens (null: no model file of vLLM is known for it)."""
BOOKKEEPING_BYTES = 8 << 20
"""More than flags, counts, ids and the low-latency dispatch take beside rows and weights."""


def configs_of(values: dict[str, Any], **options: Any) -> Any:
    return vllm_configs(model_of(values), VllmOptions(**{"data_parallel_size": 8, **options}))


@pytest.mark.parametrize("name", FAMILIES)
def test_model_families(name):
    _, values, (hidden_dim, experts, topk, cast), shares_tokens = FAMILIES[name]
    model, options = model_of(values), VllmOptions(data_parallel_size=4, tensor_parallel_size=2)
    assert model.is_known == (shares_tokens is not None)
    tokens = 4096 if shares_tokens else 8192
    configs = vllm_configs(model, options)
    assert [config.rank for config in configs] == list(range(8))
    for config in configs:
        assert (config.hidden_dim, config.total_experts, config.topk) == (hidden_dim, experts, topk)
        assert (config.dispatch_quant, config.data_type, config.combined_dtype) == (cast, *[torch.bfloat16] * 2)
        assert (config.layout, config.max_num_inp_token_per_rank) == ("rank_major", tokens)
    assert said_of(values).startswith("a guess: ") == (shares_tokens is None)
    # rows of eight ranks with weights come and go, and the sums lie beside them
    scales = {"none": hidden_dim, "fp8_per_token": 4, "fp8_per_1x128": hidden_dim // 128 * 4}
    back = 2 * hidden_dim + 4 * topk
    rows = 8 * tokens * (hidden_dim + scales[cast] + 4 * topk) + 9 * tokens * back
    assert 0 < vllm_plan(model, options).bytes_by_rank[0] - rows < BOOKKEEPING_BYTES


def said_of(values: dict[str, Any], **options: Any) -> str:
    """What a plan assumes, a line for each assumption."""
    model, chosen = model_of(values), VllmOptions(**{"data_parallel_size": 4, **options})
    return "\n".join(assumptions(model, chosen, vllm_configs(model, chosen)[0]))


@pytest.mark.parametrize(
    ("name", "quantization", "planned", "other"),
    [
        ("deepseek-v4-flash", None, "none", "fp8_per_1x128"),
        ("DeepSeek-V3", None, "fp8_per_1x128", "none"),
        ("DeepSeek-V3", {"quant_method": "mxfp8"}, "none", "mxfp8"),
        ("DeepSeek-V3", {"quant_method": "modelopt", "quant_algo": "MXFP8"}, "none", "mxfp8"),
    ],
)
def test_the_cast_for_other_experts_is_named(name, quantization, planned, other):
    """A family with MXFP4 experts, and one with fp8 or MXFP8 experts, whose rows travel as bfloat16 or fp8."""
    values = FAMILIES[name][1] | ({"quantization_config": quantization} if quantization else {})
    assert configs_of(values)[0].dispatch_quant == planned
    assert f"--quant {other} for" in said_of(values)
    assert "--quant" not in said_of(values, quant=planned)


@pytest.mark.parametrize(("quantization", "cast"), TABLES["casts"])
def test_casts_by_quantization(quantization, cast):
    for key in ("quantization_config", "compression_config"):
        assert configs_of({**DEEPSEEK, key: quantization})[0].dispatch_quant == cast
    nested = {"text_config": {**DEEPSEEK, "quantization_config": quantization}}
    assert configs_of(nested)[0].dispatch_quant == cast
    # where a row is not a multiple of the group, vLLM's own function quantises it on arrival
    odd = configs_of({**DEEPSEEK, "quantization_config": quantization}, hidden=7232)[0]
    assert odd.dispatch_quant == ("none" if cast == "fp8_per_1x128" else cast)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "torch.float16"}, torch.float16),
        ({"torch_dtype": "half"}, torch.float16),
        ({"torch_dtype": "float32"}, torch.bfloat16),
        ({"torch_dtype": None}, torch.bfloat16),
        ({}, torch.bfloat16),
    ],
)
def test_dtypes(names, expected):
    assert configs_of({**DEEPSEEK, **names})[0].data_type == expected
    assert configs_of({**DEEPSEEK, **names}, dtype=torch.float32)[0].data_type == torch.float32


def test_options_override_the_model():
    values = {**DEEPSEEK, "quantization_config": BLOCK_FP8}
    assert configs_of(values, quant="none")[0].dispatch_quant == "none"
    assert configs_of(values, quant="fp8_per_token")[0].dispatch_quant == "fp8_per_token"
    assert configs_of(values, hidden=7424)[0].hidden_dim == 7424


def of_group(**changes: Any) -> dict[str, Any]:
    return {**PER_TOKEN_FP8, "config_groups": {"g": {**GROUP, **changes}}}


def blocks_of(structure: Any) -> dict[str, Any]:
    return of_group(weights={**FLOAT8, "strategy": "block", "block_structure": structure})


ODD_SIZES = ([128], [128, 128, 128], [128, "128"], [128, 0], [128, 128.0], [], "128x128", 128, {"rows": 1})


def mixed(**layer: Any) -> dict[str, Any]:
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0.mlp.experts": layer}}


ODD_VALUES = [
    *(({"torch_dtype": dtype}, "torch_dtype") for dtype in (5, True, ["float16"], "bananas", "nn")),
    *(({key: value}, key) for key in ("architectures", "text_config") for value in (5, [5], "a")),
    *(({"model_type": value}, "model_type") for value in (5, ["a"])),
    ({"text_config": {"model_type": 5}}, "model_type"),
    ({"model_type": "deepseek_v4", "expert_dtype": 5}, "expert_dtype"),
    ({"dim": 7168, "moe": 5}, "moe"),
    ({"dim": "7168", "moe": {}}, "dim"),
]
ODD_QUANTIZATIONS = [
    ("fp8", "quantization_config"),
    (["fp8"], "quantization_config"),
    *(({"quant_method": method}, "quant_method") for method in (5, 0, ["fp8"])),
    ({"quant_algo": 7}, "quant_algo"),
    (mixed(quant_algo=7), "quant_algo"),
    (mixed(quant_algo="FP8_PB_WO", group_size="128"), "group_size"),
    *(({**mixed(), "quantized_layers": layers}, "quantized_layers") for layers in (None, {}, [5])),
    ({**BLOCK_FP8, "activation_scheme": 5}, "activation_scheme"),
    ({**BLOCK_FP8, "ignored_layers": [5]}, "ignored_layers"),
    *(({**BLOCK_FP8, "weight_block_size": sizes}, "weight_block_size") for sizes in ODD_SIZES),
    ({**PER_TOKEN_FP8, "config_groups": ["a"]}, "config_groups"),
    ({**PER_TOKEN_FP8, "config_groups": {"g": "a"}}, "g"),
    *((of_group(targets=targets), "targets") for targets in (1, [1])),
    (of_group(weights="fp8"), "weights"),
    (of_group(input_activations=[8]), "input_activations"),
    (of_group(input_activations={**FLOAT8, "num_bits": "8"}), "num_bits"),
    *((blocks_of(odd), "block_structure") for odd in ("AxB", "128", "128x", "128x128x128", [128], 128)),
]


@pytest.mark.parametrize(
    ("values", "named"),
    [*ODD_VALUES, *(({"quantization_config": values}, named) for values, named in ODD_QUANTIZATIONS)],
)
def test_a_value_of_another_type_is_refused_by_its_key_and_file(tmp_path, values, named):
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK, **values}))
    with pytest.raises(ConfigError, match=f"by {named} in") as caught:
        read_model(tmp_path)
    assert caught.value.remedy == f"Correct {tmp_path / 'config.json'}."


def test_tokens_and_ranks_by_parallel_sizes():
    def tokens_and_ranks(values: dict[str, Any], **options: Any) -> tuple[int, int]:
        config = configs_of(values, **options)[0]
        return config.max_num_inp_token_per_rank, config.world_size

    assert tokens_and_ranks(DEEPSEEK) == (8192, 8)
    shared = {"data_parallel_size": 2, "tensor_parallel_size": 3, "max_num_batched_tokens": 1000}
    assert tokens_and_ranks(DEEPSEEK, **shared) == (334, 6)
    assert tokens_and_ranks(DEEPSEEK, **shared, sequence_parallel=False) == (1000, 6)
    # vLLM's layers of this model know no sequence parallelism
    copied = {**DEEPSEEK, "model_type": "glm4_moe"}
    assert tokens_and_ranks(copied, **shared) == (1000, 6)
    assert tokens_and_ranks(copied, **shared, sequence_parallel=True) == (334, 6)


def test_redundant_experts():
    assert configs_of(DEEPSEEK, num_redundant_experts=32)[0].total_experts == 288
    with pytest.raises(ConfigError, match=r"multiple of the 8 ranks.*256 \+ 3"):
        configs_of(DEEPSEEK, num_redundant_experts=3)
    uneven = configs_of({**DEEPSEEK, "n_routed_experts": 60})
    assert [config.num_local_experts for config in uneven] == [8] * 4 + [7] * 4


@pytest.mark.parametrize(
    "values", [{"hidden_size": 4096}, {**DEEPSEEK, "n_routed_experts": None}, {"num_experts": 1, "hidden_size": 64}, {}]
)
def test_a_model_without_experts_is_refused_with_the_keys_looked_for(values):
    with pytest.raises(UnsupportedError) as caught:
        model_of(values)
    for key in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "text_config"):
        assert key in caught.value.expected


def test_a_model_that_lacks_a_number_is_refused_with_the_keys_looked_for():
    for missing, named in (("num_experts_per_tok", "moe_topk"), ("hidden_size", "hidden_size")):
        with pytest.raises(ConfigError, match=named):
            model_of({key: value for key, value in DEEPSEEK.items() if key != missing})


def test_a_file_or_its_folder_is_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("[1]")
    with pytest.raises(ConfigError, match=r"a JSON object in .*config\.json") as caught:
        read_model(tmp_path)
    assert caught.value.remedy == f"Correct {file}."
    file.write_text(json.dumps(DEEPSEEK))
    assert read_model(tmp_path) == read_model(file) == model_of(DEEPSEEK)


@pytest.mark.parametrize("key", ["n_routed_experts", "num_experts_per_tok"])
@pytest.mark.parametrize("number", [True, [8, False], "8", 8.0, {"value": 8}, 10**12, 10**4000])
def test_what_is_no_whole_number_is_refused_with_its_key_and_file(tmp_path, key, number):
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK, key: number}))
    with pytest.raises(ConfigError, match=f"'{key}' to be a whole number") as caught:
        read_model(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.remedy
    assert len(caught.value.got) < 300


def test_a_list_of_modules_may_be_long():
    quantization = {**BLOCK_FP8, "ignored_layers": [f"model.layers.{n}.mlp.gate" for n in range(2000)]}
    values = {**DEEPSEEK, "num_hidden_layers": 2**31 - 1, "quantization_config": quantization}
    assert model_of(values).quantization.name == "fp8"


def test_a_quantisation_that_config_json_lacks_is_read_from_the_file_beside_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    beside = tmp_path / "hf_quant_config.json"
    for algorithm, weights in (("MXFP8", "MXFP8"), ("NVFP4", "")):
        beside.write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
        model = read_model(tmp_path)
        assert model == model_of(
            {**DEEPSEEK, "quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}}
        )
        assert model.quantization[:2] == ("modelopt", weights)
    beside.write_text('{"quantization": 1}')
    with pytest.raises(ConfigError, match="by quantization in") as caught:
        read_model(tmp_path)
    assert str(beside) in caught.value.remedy
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK, "quantization_config": BLOCK_FP8}))
    assert read_model(tmp_path).quantization.name == "fp8"


def test_mistrals_own_file_is_read(tmp_path):
    moe = {"num_experts": 128, "num_experts_per_tok": 4, "num_shared_experts": 1}
    values = {"dim": 7168, "hidden_dim": 16384, "moe": moe, "quantization": {"qformat_weight": "fp8_e4m3"}}
    (tmp_path / "params.json").write_text(json.dumps(values))
    model = read_model(tmp_path)
    assert (model.hidden_dim, model.num_experts, model.topk, model.quantization.name) == (7168, 128, 4, "fp8")
    assert model.shares_tokens
    moe["num_shared_experts"] = 0
    assert not model_of(values).shares_tokens


# --- the plan ---


@pytest.mark.parametrize("config", every_config())
def test_parts_add_up(config):
    plan = plan_of([config])
    assert sum(part.num_bytes for part in plan.parts) == plan.bytes_by_rank[0]


def test_assumptions_are_said_of():
    plain = said_of(DEEPSEEK, max_num_batched_tokens=8192)
    assert len(plain.splitlines()) == 3
    assert plain.startswith("hidden size, experts, top-k and shared tokens as the model files of vLLM 0.")
    assert "all 4 GPUs on one node (NVLink); else --gpus-per-node" in plain
    assert "8192" in said_of(DEEPSEEK)
    assert "else --no-sequence-parallel" in said_of(DEEPSEEK, tensor_parallel_size=2)
    assert "else --sequence-parallel" in said_of(FAMILIES["Mixtral-8x7B"][1], tensor_parallel_size=2)
    assert "--hidden 3072" in said_of(FAMILIES["gpt-oss-120b"][1])
    two_nodes = said_of(DEEPSEEK, data_parallel_size=16)
    assert "2 nodes with 8 of the 16 GPUs each; else --gpus-per-node" in two_nodes
    assert "torch.distributed" in two_nodes
    assert "EP_A2A_INTERNODE_TRANSPORT" in two_nodes
    assert "all 16 GPUs on one node (NVLink)\n" in said_of(DEEPSEEK, data_parallel_size=16, gpus_per_node=16)


def test_more_experts_per_token_than_there_are_is_refused():
    with pytest.raises(TopKError, match="<= 4, the number of experts; got 8"):
        plan_op(experts=4, topk=8)
    with pytest.raises(ConfigError, match=r"'num_experts_per_tok'.* <= 4, the number of experts; got 8"):
        model_of(DEEPSEEK | {"n_routed_experts": 4})
    with pytest.raises(ConfigError, match=r"'num_experts_per_tok'.* <= 32"):
        model_of(DEEPSEEK | {"num_experts_per_tok": 33})


def test_nodes():
    def nodes(world_size: int, **options: Any) -> tuple[int, int, str, str]:
        config = configs_of(DEEPSEEK, data_parallel_size=world_size, **options)[0]
        nodes = config.world_size // config.gpu_per_node
        return nodes, config.gpu_per_node, config.kernel_type.name, config.internode_transport

    transport = "torch.distributed"
    assert nodes(6) == (1, 6, "IntraNode", "auto")
    assert nodes(32) == (4, 8, "InterNodeV1", transport)
    assert nodes(32, max_num_batched_tokens=512) == (4, 8, "InterNodeV1LL", transport)
    assert nodes(8, gpus_per_node=4) == (2, 4, "InterNodeV1", transport)
    assert nodes(16, gpus_per_node=16) == (1, 16, "IntraNode", "auto")
    for world_size, options in ((12, {}), (8, {"gpus_per_node": 3}), (4, {"gpus_per_node": 8})):
        with pytest.raises(ConfigError, match="gpus_per_node to divide"):
            nodes(world_size, **options)
    assert nodes(12, gpus_per_node=6) == (2, 6, "InterNodeV1", transport)


# --- the command ---


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app.app, ["plan", *arguments])


@pytest.fixture
def model_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**DEEPSEEK, "quantization_config": BLOCK_FP8}))
    return str(file)


def test_json_is_pure_and_in_bytes(model_file):
    result = run("--vllm", model_file, "--data-parallel-size", "4", "--max-num-batched-tokens", "512", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["op"]["quant"] == "fp8_per_1x128"
    by_part = found["bytes_per_gpu"]
    total = by_part.pop("total")
    assert by_part["dispatch_rows"] == 4 * 512 * 7168
    assert by_part["scales_and_weights"] == 4 * 512 * (56 + 8) * 4
    assert by_part["combine_rows"] == 4 * 512 * (7168 * 2 + 8 * 4)
    assert sum(by_part.values()) == total
    assert found["bytes_by_rank"] == [total] * 4
    assert found["bytes_of_all_gpus"] == 4 * total
    assert found["bytes_allocated_later"] == {}


def test_any_op(model_file):
    arguments = "--ranks 3 --max-tokens 64 --hidden 256 --topk 2 --experts 7 --dtype float16 --quant fp8_per_token "
    arguments += "--combine-quant fp8_blockwise --layout expert_major --scale-format ue8m0 --flagged-max-tokens 16"
    found = json.loads(run(*arguments.split(), "--json").stdout)
    sizes = {"ranks": 3, "max_tokens_per_rank": 64, "hidden_dim": 256, "topk": 2, "experts": 7, "dtype": "float16"}
    casts = {"quant": "fp8_per_token", "combine_quant": "fp8_blockwise", "scale_format": "ue8m0"}
    rest = {"layout": "expert_major", "max_total_recv_tokens": 0, "flagged_max_tokens": 16}
    assert found["op"] == sizes | casts | rest
    assert found["bytes_by_rank"][0] > found["bytes_by_rank"][1] == found["bytes_by_rank"][2]
    assert found["bytes_allocated_later"] == {"combine_input": 3 * 3 * 64 * 256 * 2}
    capped = json.loads(run("--max-total-recv-tokens", "100", "--ranks", "8", "--json").stdout)
    assert capped["bytes_per_gpu"]["dispatch_rows"] == 104 * 7168 * 2


def test_training():
    sizes = ["--ranks", "8", "--max-tokens", "8192", "--hidden", "7168", "--topk", "8", "--training"]
    found = json.loads(run(*sizes, "--json").stdout)
    assert found["bytes_allocated_later"] == {}
    kept = found["bytes_kept_per_layer"]
    assert kept["received_rows"] == 8 * 8192 * 7168 * 2
    assert kept["in_a_checkpoint"] == 8192 * (7168 * 2 + 8 * 8)
    # rows of MinimalAsyncEP, two for each copy of a token
    assert found["bytes_per_gpu"]["total"] < 0.14 * 2 * 8 * 8192 * 8 * 7168 * 2
    printed = " ".join(run(*sizes).stdout.split())
    assert "each layer keeps 900.2 MiB more from forward to backward" in printed
    assert "With group: 14.0 GiB instead, the experts' rows and results." in printed
    assert "layout compact or rank_major for gradients" in str(run(*sizes, "--layout", "expert_major").exception)


def test_more_ranks_than_a_node_has_take_rings():
    across = json.loads(run("--ranks", "16", "--gpus-per-node", "8", "--json").stdout)
    assert across["assumed"] == [RINGS_ASSUMED]
    assert across["bytes_per_gpu"]["rings"] > 0
    inside = json.loads(run("--ranks", "16", "--json").stdout)
    assert inside["assumed"] == []
    assert "rings" not in inside["bytes_per_gpu"]


def test_the_table(model_file):
    result = run("--vllm", model_file, "--data-parallel-size", "8", "--max-num-batched-tokens", "4096")
    assert result.exit_code == 0
    # the total first
    total = re.search(r"│ total +│ +([\d.]+)", result.stdout)
    assert result.stdout.startswith(f"{float(total[1]):.1f} MiB on each of 8 GPUs, ")
    for text in ("dispatch rows", "224.00", "flagged region", "combine rows", "result", "local", "total"):
        assert text in result.stdout
    for text in ("later", "Certain calls"):
        assert text not in result.stdout
    result = run("--vllm", model_file, "--data-parallel-size", "16", "--gpus-per-node", "4")
    for text in ("lines sent", "32768 lines", "sums between nodes", "each of 16 GPUs", "4 nodes with 4"):
        assert text in " ".join(result.stdout.replace("│", " ").split())
    result = run("--experts", "260", "--layout", "expert_major")
    printed = " ".join(result.stdout.replace("│", " ").split())
    for text in ("expert rows", "reduced rows", "fewer experts", "combine input", "later", "Certain calls allocate"):
        assert text in printed
