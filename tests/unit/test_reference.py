"""The executable specification, checked against token-by-token Python and against a dense MoE."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_a2a import reference
from ep_a2a.config import num_owned_experts
from ep_a2a.errors import ConfigError, DtypeError, ShapeError, TooManyTokensError, TopKError, UnknownNameError
from ep_a2a.routing import ROUTINGS

HIDDEN = 8
LAYOUTS = ("compact", "rank_major")


class Case:
    """Inputs of all ranks; every token holds its own identity in its first two elements."""

    def __init__(
        self,
        num_tokens: list[int],
        topk: int,
        num_experts: int,
        routing: str = "uniform",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_tokens, self.num_experts, self.world_size = num_tokens, num_experts, len(num_tokens)
        make = ROUTINGS[routing]
        self.ids = [make(count, topk, num_experts, self.world_size, generator) for count in num_tokens]
        self.tokens = [torch.randn(count, HIDDEN, generator=generator).to(dtype) for count in num_tokens]
        for rank, rank_tokens in enumerate(self.tokens):
            rank_tokens[:, 0] = rank
            rank_tokens[:, 1] = torch.arange(len(rank_tokens))
        self.weights = [torch.rand(count, topk, generator=generator) for count in num_tokens]
        self.scales = [torch.rand(count, 2, generator=generator) for count in num_tokens]

    def dispatch(
        self, layout: str = "compact", step_tokens: int = 16, stride_tokens: int | None = 100, pad_id: int = -1
    ) -> list[reference.DispatchReference]:
        return reference.dispatch_reference(
            self.tokens,
            self.weights,
            self.scales,
            self.ids,
            num_experts=self.num_experts,
            step_tokens=step_tokens,
            layout=layout,
            stride_tokens=stride_tokens,
            pad_id=pad_id,
        )

    def owned(self, rank: int) -> range:
        counts = [num_owned_experts(self.num_experts, self.world_size, r) for r in range(rank + 1)]
        return range(sum(counts[:rank]), sum(counts))

    def received_by(self, rank: int) -> list[tuple[int, int]]:
        """(source, token) pairs by the definition."""
        own = self.owned(rank)
        return [
            (source, token)
            for source, rank_ids in enumerate(self.ids)
            for token, row in enumerate(rank_ids.tolist())
            if any(expert in own for expert in row)
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world_size = draw(st.sampled_from([1, 2, 3, 5, 6, 8]))
    return Case(
        num_tokens=draw(st.lists(st.integers(0, 6), min_size=world_size, max_size=world_size)),
        topk=draw(st.integers(1, 32)),
        num_experts=draw(st.integers(1, 4 * world_size)),
        routing=draw(st.sampled_from(sorted(ROUTINGS))),
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=cases())
@settings(max_examples=40)
def test_dispatch_by_definition(layout: str, case: Case) -> None:
    stride = case.world_size * 100
    for rank, got in enumerate(case.dispatch(layout, pad_id=-7)):
        expected = case.received_by(rank)
        assert got.total_recv == len(expected)
        lead = (len(expected),) if layout == "compact" else (case.world_size, 16)
        assert got.tokens.shape == (*lead, HIDDEN)
        assert (got.padding_rows(got.ids) == -7).all()
        assert not got.padding_rows(got.tokens).any()
        assert got.counts_per_source.tolist() == [
            sum(source == s for source, _ in expected) for s in range(case.world_size)
        ]
        assert got.counts_per_source.dtype == got.source_positions.dtype == got.ids.dtype == torch.int32
        assert got.valid_rows(got.source_positions).tolist() == [s * stride + t for s, t in expected]
        for tensor, inputs in (
            (got.tokens, case.tokens),
            (got.weights, case.weights),
            (got.scales, case.scales),
            (got.ids, case.ids),
        ):
            rows = got.valid_rows(tensor)
            assert rows.shape == (len(expected), inputs[0].shape[1])
            assert all(torch.equal(row, inputs[s][t]) for row, (s, t) in zip(rows, expected))


def test_stride_defaults_to_step_tokens() -> None:
    (got,) = Case([4], 1, 2).dispatch(step_tokens=6, stride_tokens=None)
    assert got.tokens_per_source == 6
    second = Case([2, 2], 2, 2, "one_expert_per_rank").dispatch(step_tokens=6, stride_tokens=None)[1]
    assert second.source_positions.tolist() == [0, 1, 12, 13]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_combine_sums_ascending_in_float32_and_rounds_once(dtype: torch.dtype) -> None:
    case = Case([4, 1, 3, 0, 2], 6, 23, dtype=dtype)
    received = case.dispatch()
    generator = torch.Generator().manual_seed(9)
    rows = [torch.randn(got.total_recv, HIDDEN, generator=generator).to(dtype) for got in received]
    row_of = [{pair: row for row, pair in enumerate(case.received_by(rank))} for rank in range(5)]
    for source, out in enumerate(reference.combine_reference(rows, received, case.num_tokens, dtype)):
        for token in range(case.num_tokens[source]):
            total = torch.zeros(HIDDEN)
            for rank in range(5):
                if (source, token) in row_of[rank]:
                    total = total + rows[rank][row_of[rank][source, token]].float()
            assert torch.equal(out[token], total.to(dtype))


def make_experts(num_experts: int, ffn: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(num_experts, 2 * ffn, HIDDEN, generator=generator) / HIDDEN**0.5
    return w1, torch.randn(num_experts, HIDDEN, ffn, generator=generator) / ffn**0.5


def dense_by_token(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    ffn = w2.shape[2]
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if 0 <= expert < w1.shape[0]:
                gate = w1[expert, :ffn].double() @ x[token].double()
                up = w1[expert, ffn:].double() @ x[token].double()
                hidden = gate / (1 + torch.exp(-gate)) * up
                out[token] += weights[token, slot].double() * (w2[expert].double() @ hidden)
    return out.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_dense_moe_by_definition(routing: str, dtype: torch.dtype) -> None:
    """In float32 also where inputs are not."""
    case = Case([7], 5, 6, routing, dtype)
    args = case.tokens[0], case.weights[0], case.ids[0], *(each.to(dtype) for each in make_experts(6))
    out = reference.dense_moe(*args)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, dense_by_token(*args), rtol=1e-4, atol=1e-4)


def test_expert_rows_use_own_experts_only() -> None:
    case = Case([6], 4, 8, "out_of_range")
    w1, w2 = make_experts(8)
    x, weights, ids = case.tokens[0], case.weights[0], case.ids[0]
    own = torch.where((ids >= 2) & (ids < 5), ids, -1)
    poisoned = w1.clone()
    poisoned[[0, 1, 5, 6, 7]] = float("nan")
    rows = reference.expert_mlp_rows(x.half(), ids, weights, poisoned, w2, 2, 3)
    assert rows.dtype == torch.float16
    assert torch.equal(rows, reference.dense_moe(x.half(), weights, own, w1, w2).half())
    assert torch.equal(reference.expert_mlp_rows(x, ids, weights, w1, w2, 2, 0), torch.zeros_like(x))


def run_moe(case: Case, layout: str, w1: torch.Tensor, w2: torch.Tensor) -> list[torch.Tensor]:
    received = case.dispatch(layout)
    rows = []
    for rank, got in enumerate(received):
        own = case.owned(rank)
        valid = (got.valid_rows(got.tokens), got.valid_rows(got.ids), got.valid_rows(got.weights))
        rows.append(reference.expert_mlp_rows(*valid, w1, w2, own.start, len(own)))
    return reference.combine_reference(rows, received, case.num_tokens, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=cases())
@settings(max_examples=30)
def test_expert_parallel_equals_dense(layout: str, case: Case) -> None:
    w1, w2 = make_experts(case.num_experts)
    for source, out in enumerate(run_moe(case, layout, w1, w2)):
        dense = reference.dense_moe(case.tokens[source], case.weights[source], case.ids[source], w1, w2)
        torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-3)


def test_dispatch_refuses_what_does_not_fit() -> None:
    with pytest.raises(TooManyTokensError):
        Case([3, 2], 2, 4).dispatch(step_tokens=2)
    with pytest.raises(ConfigError, match="int32"):
        Case([1, 1], 2, 4).dispatch(stride_tokens=2**30)
    with pytest.raises(UnknownNameError, match="rank_major"):
        Case([1, 1], 2, 4).dispatch("dense")
    for name, index, wrong, error in (
        ("ids", 1, torch.zeros(1, 2, dtype=torch.int64), DtypeError),
        ("ids", 1, torch.zeros(1, 3, dtype=torch.int32), TopKError),
        ("ids", 1, torch.zeros(2, 2, dtype=torch.int32), ShapeError),
        ("tokens", 1, torch.zeros(1, HIDDEN, dtype=torch.bfloat16), DtypeError),
        ("tokens", 1, torch.zeros(1, HIDDEN + 1), ShapeError),
        ("weights", 0, None, ShapeError),
        ("scales", 1, torch.zeros(4, 2), ShapeError),
    ):
        case = Case([1, 1], 2, 4)
        getattr(case, name)[index] = wrong
        with pytest.raises(error):
            case.dispatch()
    case = Case([1, 1], 2, 4)
    case.ids.pop()
    with pytest.raises(ShapeError):
        case.dispatch()


def test_combine_refuses_other_row_counts() -> None:
    case = Case([2, 2], 2, 4, "one_expert_per_rank")
    received = case.dispatch()
    rows = [got.tokens for got in received]
    with pytest.raises(ShapeError, match="expert rows"):
        reference.combine_reference([rows[0], rows[1][:-1]], received, case.num_tokens, torch.float32)
