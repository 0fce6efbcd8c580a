"""Ownership, traffic and routing generators, compared with plain Python counting."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_a2a import routing
from ep_a2a.config import num_owned_experts
from ep_a2a.errors import ConfigError, DtypeError, ShapeError, TopKError

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
WORLD_SIZES = (1, 2, 3, 5, 6, 8, 72)
GROUPS = [(256, 8), (60, 8), (256, 72), (8, 8), (7, 5), (6, 6), (3, 5), (1, 1), (1, 3), (17, 3), (72, 72), (100, 6)]


def owners_by_counting(num_experts: int, world_size: int) -> list[int]:
    return [r for r in range(world_size) for _ in range(num_owned_experts(num_experts, world_size, r))]


def make(name: str, num_tokens: int, topk: int, num_experts: int, world_size: int, seed: int = 0) -> torch.Tensor:
    return routing.ROUTINGS[name](num_tokens, topk, num_experts, world_size, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_experts", "world_size"), GROUPS)
def test_ranges_partition_the_experts(num_experts: int, world_size: int) -> None:
    ranges = routing.expert_ranges(num_experts, world_size)
    assert len(ranges) == world_size
    assert [e for start, end in ranges for e in range(start, end)] == list(range(num_experts))
    assert [end - start for start, end in ranges] == [
        num_owned_experts(num_experts, world_size, rank) for rank in range(world_size)
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_experts", "world_size"), GROUPS)
def test_owner_of_every_expert(num_experts: int, world_size: int, dtype: torch.dtype) -> None:
    outside = [-1, -2, -num_experts, num_experts, num_experts + 1, INT32_MIN, INT32_MAX]
    owners = routing.owner_of_experts(
        torch.tensor([*range(num_experts), *outside], dtype=dtype), num_experts, world_size
    )
    assert owners.dtype == torch.int32
    assert owners.tolist() == owners_by_counting(num_experts, world_size) + [-1] * len(outside)


def test_without_experts_every_id_is_dropped() -> None:
    assert routing.owner_of_experts(torch.tensor([[0, -1, 5]]), 0, 3).tolist() == [[-1, -1, -1]]


def test_ids_beyond_int32_are_dropped() -> None:
    assert routing.owner_of_experts(torch.tensor([2**32, 2**32 + 1, -(2**40)]), 8, 2).tolist() == [-1, -1, -1]


@given(data=st.data(), world_size=st.sampled_from(WORLD_SIZES), topk=st.integers(1, 32), num_tokens=st.integers(0, 6))
@settings(max_examples=60)
def test_masks_and_traffic_by_counting(data: st.DataObject, world_size: int, topk: int, num_tokens: int) -> None:
    num_experts = data.draw(st.integers(1, 3 * world_size + 1))
    expert = st.one_of(
        st.integers(0, num_experts - 1), st.sampled_from([-1, INT32_MIN, INT32_MAX, num_experts, -num_experts])
    )
    rows = data.draw(st.lists(st.lists(expert, min_size=topk, max_size=topk), min_size=num_tokens, max_size=num_tokens))
    ids = torch.tensor(rows, dtype=torch.int32).reshape(num_tokens, topk)
    owners = owners_by_counting(num_experts, world_size)
    hits = [[owners[e] for e in row if 0 <= e < num_experts] for row in rows]
    mask = routing.destination_mask(ids, num_experts, world_size)
    assert mask.shape == (num_tokens, world_size)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[rank in hit for rank in range(world_size)] for hit in hits]
    assert routing.num_distinct_ranks(ids, num_experts, world_size).tolist() == [len(set(hit)) for hit in hits]

    source = data.draw(st.integers(0, world_size - 1))
    per_rank = [ids if rank == source else ids[:0] for rank in range(world_size)]
    rows_sent = routing.traffic_matrix(per_rank, num_experts, world_size)
    slots_sent = routing.traffic_matrix(per_rank, num_experts, world_size, deduplicate=False)
    assert rows_sent.dtype == slots_sent.dtype == torch.int64
    assert rows_sent.shape == slots_sent.shape == (world_size, world_size)
    assert rows_sent[source].tolist() == [sum(r in hit for hit in hits) for r in range(world_size)]
    assert slots_sent[source].tolist() == [sum(hit.count(r) for hit in hits) for r in range(world_size)]
    assert rows_sent.sum() == rows_sent[source].sum()


def test_wrong_arguments() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(DtypeError):
        routing.owner_of_experts(ids.to(torch.float32), 8, 2)
    with pytest.raises(ConfigError):
        routing.owner_of_experts(ids, 8, 0)
    with pytest.raises(ConfigError):
        routing.expert_ranges(-1, 2)
    with pytest.raises(ShapeError):
        routing.destination_mask(ids[0], 8, 2)
    with pytest.raises(ShapeError):
        routing.traffic_matrix([ids], 8, 2)
    with pytest.raises(ShapeError):
        routing.traffic_matrix([ids[0], ids[0]], 8, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_softmax_topk(dtype: torch.dtype) -> None:
    logits = torch.randn(20, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights, ids = routing.softmax_topk(logits, 4)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    assert weights.is_contiguous()
    assert ids.is_contiguous()
    probability = torch.softmax(logits.float(), 1)
    assert torch.equal(probability.gather(1, ids.long()), weights)
    assert torch.equal(weights, probability.topk(4).values)
    assert all(len(set(row)) == 4 for row in ids.tolist())


def test_softmax_topk_prefers_lower_ids_among_equals() -> None:
    weights, ids = routing.softmax_topk(torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0]]), 4)
    assert ids.tolist() == [[1, 3, 4, 0]]
    assert weights[0, 0] == weights[0, 2]


def test_softmax_topk_edges() -> None:
    weights, ids = routing.softmax_topk(torch.zeros(0, 8), 2)
    assert weights.shape == ids.shape == (0, 2)
    assert torch.allclose(routing.softmax_topk(torch.randn(3, 8), 8)[0].sum(1), torch.ones(3))
    for k in (0, 9):
        with pytest.raises(TopKError):
            routing.softmax_topk(torch.zeros(3, 8), k)
    with pytest.raises(ShapeError):
        routing.softmax_topk(torch.zeros(8), 1)
    with pytest.raises(DtypeError):
        routing.softmax_topk(torch.zeros(3, 8, dtype=torch.int32), 1)


@pytest.mark.parametrize("name", sorted(routing.ROUTINGS))
@given(
    num_tokens=st.integers(0, 9),
    topk=st.integers(1, 32),
    num_experts=st.integers(1, 80),
    world_size=st.sampled_from(WORLD_SIZES),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_every_routing_has_shape_dtype_and_range(
    name: str, num_tokens: int, topk: int, num_experts: int, world_size: int, seed: int
) -> None:
    ids = make(name, num_tokens, topk, num_experts, world_size, seed)
    assert ids.shape == (num_tokens, topk)
    assert ids.dtype == torch.int32
    assert ids.is_contiguous()
    assert torch.equal(ids, make(name, num_tokens, topk, num_experts, world_size, seed))
    allowed = {"all_dropped": (-1, -1), "some_dropped": (-1, num_experts - 1), "out_of_range": (INT32_MIN, INT32_MAX)}
    low, high = allowed.get(name, (0, num_experts - 1))
    assert ((ids >= low) & (ids <= high)).all()
    owners = routing.owner_of_experts(ids, num_experts, world_size)
    assert (owners < world_size).all()
    if name not in ("all_dropped", "some_dropped", "out_of_range"):
        assert (owners >= 0).all()


@pytest.mark.parametrize("name", ["uniform", "zipf"])
@pytest.mark.parametrize(("topk", "num_experts"), [(8, 8), (8, 64), (32, 40)])
def test_experts_of_a_token_are_distinct(name: str, topk: int, num_experts: int) -> None:
    assert all(len(set(row)) == topk for row in make(name, 50, topk, num_experts, 4).tolist())


@pytest.mark.parametrize("name", ["uniform", "zipf"])
def test_more_slots_than_experts(name: str) -> None:
    assert all(sorted(row) == sorted([*range(3)] * 2 + row[-2:]) for row in make(name, 20, 8, 3, 2).tolist())


def test_uniform_is_even_and_zipf_is_skewed() -> None:
    uniform = torch.bincount(make("uniform", 2000, 2, 16, 4).flatten(), minlength=16)
    zipf = torch.bincount(make("zipf", 2000, 2, 16, 4).flatten(), minlength=16)
    assert uniform.max() < 1.3 * uniform.min()
    assert zipf[0] > 4 * zipf[15]
    assert zipf.argmax() == 0


@pytest.mark.parametrize(("num_experts", "world_size"), GROUPS)
def test_all_to_one(num_experts: int, world_size: int) -> None:
    assert (
        routing.owner_of_experts(make("all_to_one", 30, 8, num_experts, world_size), num_experts, world_size) == 0
    ).all()


@pytest.mark.parametrize(("num_experts", "world_size"), GROUPS)
@pytest.mark.parametrize("topk", [1, 2, 6, 32])
def test_one_expert_per_rank(num_experts: int, world_size: int, topk: int) -> None:
    ids = make("one_expert_per_rank", 20, topk, num_experts, world_size)
    used = min(world_size, num_experts)
    assert (routing.num_distinct_ranks(ids, num_experts, world_size) == min(topk, used)).all()
    assert routing.owner_of_experts(ids, num_experts, world_size)[:, 0].tolist() == [t % used for t in range(20)]
    if topk <= used * (num_experts // used):
        assert all(len(set(row)) == topk for row in ids.tolist())


def test_dropped_slots() -> None:
    assert (make("all_dropped", 5, 4, 8, 2) == -1).all()
    assert (make("some_dropped", 12, 4, 8, 2) == -1).sum() == 16


def test_out_of_range_holds_every_kind_of_junk() -> None:
    ids = make("out_of_range", 12, 4, 8, 2)
    assert {8, INT32_MIN, INT32_MAX, -1, -8, 10} <= set(ids.flatten().tolist())
    assert ((ids >= 0) & (ids < 8)).sum() == 24
    assert make("out_of_range", 1, 1, 8, 2).tolist() == [[8]]


def test_repeated_and_round_robin() -> None:
    ids = make("repeated", 40, 6, 16, 4)
    assert (ids == ids[:, :1]).all()
    assert len(set(ids[:, 0].tolist())) > 4
    assert make("round_robin", 3, 4, 5, 2).tolist() == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]
