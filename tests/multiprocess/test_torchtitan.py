"""torchtitan's dispatcher on CPU processes, over a stand-in for its base class, against torchtitan's own sums."""

import sys
from dataclasses import dataclass, fields
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ep_a2a.errors import ConfigError
from ep_a2a.testing import RankContext
from tests.cases.autograd_cases import agree

HIDDEN, TOPK, EXPERTS, TOKENS = 16, 2, 6, 5


class Base:
    """What `ep_a2a.compat.torchtitan` has of MinimalAsyncEPTokenDispatcher (tests/integration/test_torchtitan.py)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        num_experts: int = EXPERTS
        top_k: int = TOPK
        hidden_dim: int | None = HIDDEN
        num_max_tokens_per_rank: int | None = TOKENS + 2
        dtype: torch.dtype | None = torch.float32
        device: torch.device | None = None

    def __init__(self, config: Any) -> None:
        vars(self).update({field.name: getattr(config, field.name) for field in fields(config)})
        self.buffer_device = config.device

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self.ep_mesh = ep_mesh
        self.init_buffer()  # type: ignore[attr-defined]


def derive(source: Any, target: Any, **changes: Any) -> Any:
    return target(**{field.name: getattr(source, field.name) for field in fields(source)} | changes)


def compat() -> Any:
    """The module, which imports stand-ins."""
    for name, members in {
        "torchtitan": {},
        "torchtitan.config": {"derive": derive, "override": lambda **_: lambda factory: factory},
        "torchtitan.models": {},
        "torchtitan.models.common": {},
        "torchtitan.models.common.token_dispatcher": {
            "EPDispatchMetadata": SimpleNamespace,
            "MinimalAsyncEPTokenDispatcher": Base,
        },
    }.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)
    from ep_a2a.compat import torchtitan

    return torchtitan


def two_layers(context: RankContext, reduction: str) -> None:
    """Two layers over one op, recomputed in backward: results and gradients are those of experts on one rank."""
    module = compat()
    drawn, shared = (torch.Generator().manual_seed(seed) for seed in (context.rank, 99))
    experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=shared) / HIDDEN**0.5
    leaves = [torch.randn(TOKENS, size, generator=drawn).requires_grad_() for size in (HIDDEN, TOPK)]
    ids = torch.rand(TOKENS, EXPERTS, generator=drawn).topk(TOPK).indices
    counts = ids.flatten().bincount(minlength=EXPERTS)
    own = experts.chunk(context.world_size)[context.rank]
    mesh = SimpleNamespace(get_group=lambda: context.group, size=lambda: context.world_size)

    def layer(dispatcher: Any, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows, numbers, metadata = dispatcher.dispatch(tokens, scores, ids, counts)
        assert numbers.dtype == torch.int64
        *parts, rest = rows.tensor_split(numbers.cumsum(0).tolist())
        results = [torch.tanh(part @ expert) for part, expert in zip(parts, own, strict=True)]
        return dispatcher.combine(torch.cat([*results, rest * torch.nan]), metadata, tokens)

    config = module.dispatcher(Base.Config(device=torch.device("cpu")), reduction=reduction)
    with pytest.raises(ConfigError, match=r"dtype to be set; got None\. Call the model"):
        module.TokenDispatcher(module.dispatcher(Base.Config(dtype=None))).wire_meshes(ep_mesh=mesh)
    dispatchers = [module.TokenDispatcher(config) for _ in range(2)]
    for each in dispatchers:
        each.wire_meshes(ep_mesh=mesh)
    assert dispatchers[0].op is dispatchers[1].op
    result = sum(checkpoint(layer, each, *leaves, use_reentrant=False) for each in dispatchers)
    slots = torch.tanh(torch.einsum("th,tkhj->tkj", leaves[0], experts[ids]))
    want = 2 * (slots * leaves[1][..., None]).sum(1)
    agree([result], [want])
    agree(*(list(torch.autograd.grad(each.square().sum(), leaves)) for each in (result, want)))
    module.OPS.popitem()[1].close()
    assert not module.OPS


@pytest.mark.parametrize(("world_size", "reduction"), [(1, "ranks"), (2, "slots"), (3, "ranks")])
def test_two_layers(ranks: Any, world_size: int, reduction: str) -> None:
    ranks(two_layers, world_size, reduction)
