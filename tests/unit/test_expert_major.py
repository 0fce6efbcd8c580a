"""Layout expert_major where no processes are needed: its specification, and what its kernels compile to."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.errors import InputError
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.ops.bounds import Bounds
from ep_a2a.ops.expert_major import expanding, reducing
from ep_a2a.ops.launches import CombineForm, DispatchForm
from ep_a2a.reference import combine_reference, dense_moe, dispatch_reference, reduce_experts_reference
from tests.cases.configs import deepseek_v3
from tests.markers import first_is_quick
from tests.offline_compile import compile_kernel, resources, vector_accesses
from tests.unit.test_kernels_compile import engine_of
from tests.unit.test_reference import Case, cases, make_experts


@given(case=cases())
@settings(max_examples=40)
def test_rows_by_definition(case: Case) -> None:
    """Each local expert has the tokens that name it, by source and token; what is behind them is zeros."""
    for rank, got in enumerate(case.dispatch("expert_major")):
        received = case.received_by(rank)
        assert got.valid_rows(got.source_positions).tolist() == [s * 100 * case.world_size + t for s, t in received]
        assert got.tokens.shape[:2] == got.weights.shape == (len(case.owned(rank)), case.world_size * 16)
        seen = torch.full(got.expert_rows.shape, -1)
        for number, expert in enumerate(case.owned(rank)):
            expected = [(s, t) for s, t in received if expert in case.ids[s][t].tolist()]
            assert int(got.expert_counts[number]) == len(expected)
            assert not got.tokens[number, len(expected) :].any()
            assert not got.scales[number, len(expected) :].any()
            assert not got.weights[number, len(expected) :].any()
            for place, (s, t) in enumerate(expected):
                assert torch.equal(got.tokens[number, place], case.tokens[s][t])
                assert torch.equal(got.scales[number, place], case.scales[s][t])
                weight = case.weights[s][t][case.ids[s][t] == expert].sum()
                torch.testing.assert_close(got.weights[number, place], weight)
                row = received.index((s, t))
                seen[row, case.ids[s][t] == expert] = number * case.world_size * 16 + place
        assert torch.equal(got.expert_rows, seen)


@given(case=cases())
@settings(max_examples=30)
def test_expert_parallel_equals_dense(case: Case) -> None:
    w1, w2 = make_experts(case.num_experts)
    received = case.dispatch("expert_major")
    sent = []
    for rank, got in enumerate(received):
        own = case.owned(rank)
        results = torch.full_like(got.tokens, torch.nan)
        for number, count in enumerate(got.expert_counts.tolist()):
            gate, up = (got.tokens[number, :count] @ w1[own[number]].T).chunk(2, dim=1)
            results[number, :count] = (torch.nn.functional.silu(gate) * up) @ w2[own[number]].T
        sent.append(reduce_experts_reference(results, got, torch.float32))
    for source, out in enumerate(combine_reference(sent, received, case.num_tokens, torch.float32)):
        dense = dense_moe(case.tokens[source], case.weights[source], case.ids[source], w1, w2)
        torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-3)


def test_weights_are_needed() -> None:
    ids = [torch.zeros(1, 1, dtype=torch.int32)]
    with pytest.raises(InputError, match="weights with layout expert_major"):
        dispatch_reference(
            [torch.zeros(1, 4)], [None], [None], ids, num_experts=1, step_tokens=1, layout="expert_major"
        )


config_of = functools.partial(deepseek_v3, rank=1, layout="expert_major", expert_alignment=128)


def variants_of(config: EpDispatchCombineConfig) -> list[CompiledKernel]:
    return [each for each in engine_of(config).compiled_kernels() if re.search("expand|expert_rows|reduce", each.name)]


def test_a_bound_on_multiprocessors_is_one_on_programs() -> None:
    config = config_of()
    for max_sms, most in ((24, (24, 24)), (0, (528, 1056))):
        kernels = engine_of(config).kernels
        kernels.max_sms = max_sms
        bounds = Bounds.of(config, 4096)
        form = DispatchForm(config.data_type, has_scales=False, has_weights=True, num_tokens=4096, bounds=bounds)
        numbering, copying = expanding(kernels, form)
        adding = reducing(kernels, CombineForm(False, False, (False, False), 4096, bounds))
        assert numbering.num_programs == config.num_local_experts == 32
        assert (copying.num_programs, adding.num_programs) == most


FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "cast": {"quant_type": "fp8_per_1x128"},
    "odd-rows": {"world_size": 2, "hidden_dim": 2880},
    "fp32-many-experts": {"data_type": torch.float32, "num_experts_per_token": 32, "world_size": 4},
}


@pytest.mark.parametrize("changes", first_is_quick(FORMS.items()))
def test_rows_move_in_vectors(changes: dict[str, Any], tmp_path: Path) -> None:
    """And none is spilled."""
    variants = variants_of(config_of(**changes))
    assert len(variants) == 3
    for variant in variants:
        asm = compile_kernel(variant)
        loads, stores = vector_accesses(asm["ptx"])
        assert loads > 0, variant.kernel.__name__
        assert stores > 0 or variant.kernel.__name__ == "number_expert_rows_kernel"
        used = resources(asm["cubin"], tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0


@pytest.mark.full
def test_an_older_gpu_and_scales_of_bytes() -> None:
    config = config_of(data_type=torch.float8_e4m3fn, scale_dim=5, scale_type_size=1, hidden_dim=144)
    for variant in variants_of(config):
        assert ".target sm_80" in compile_kernel(variant, 80)["ptx"]
