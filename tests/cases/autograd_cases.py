"""Bodies of the tests of ep_a2a.autograd: a layer over ranks against a dense layer on each rank's own tokens."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ep_a2a
from ep_a2a import autograd, errors
from ep_a2a.config import FP8_DTYPE
from ep_a2a.ops.base_op import BaseOp
from ep_a2a.quantization import dequantize, quantize
from ep_a2a.testing import RankContext
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case

HIDDEN, TOPK, MAX_TOKENS = 16, 3, 6
Layer = Callable[..., Tensor]


def make(context: RankContext, **kwargs: Any) -> BaseOp:
    sizes = {"hidden_size": HIDDEN, "topk": TOPK, "max_tokens": MAX_TOKENS, "dtype": torch.float32}
    sizes |= {"num_experts": 2 * context.world_size + 1}  # the first rank owns one more
    return ep_a2a.make_op(context.group, **sizes | {"device": context.device} | kwargs)


@dataclass
class Inputs:
    """What a rank gives to a layer. Experts: all of them, the rank's own as a leaf, and the number of the first."""

    tokens: Tensor
    weights: Tensor
    ids: Tensor
    experts: Tensor
    own: Tensor
    first: int

    @classmethod
    def of(cls, op: BaseOp, num_tokens: int, seed: int = 0) -> Inputs:
        config, device = op.config, op.device
        shared, own = (torch.Generator().manual_seed(seed + each) for each in (0, 1 + config.rank))
        experts = (
            torch.randn(config.total_experts, config.hidden_dim, config.hidden_dim, generator=shared)
            / config.hidden_dim**0.5
        )
        tokens, weights = (torch.randn(num_tokens, size, generator=own) for size in (config.hidden_dim, TOPK))
        ids = torch.rand(num_tokens, config.total_experts, generator=own).topk(TOPK).indices.int()
        # dropped slots, and a token that goes nowhere
        ids[::2, 1] = -1
        ids[3:4] = -1
        first, last = config.first_expert, config.first_expert + config.num_local_experts
        leaves = [each.to(device).requires_grad_() for each in (tokens, weights, experts[first:last].clone())]
        return cls(leaves[0], leaves[1], ids.to(device), experts.to(device), leaves[2], first)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.tokens, self.weights, self.own]

    @property
    def args(self) -> tuple[Any, ...]:
        """Those of a layer, behind the op."""
        return self.tokens, self.weights, self.ids, self.own, self.first


def moe(op: BaseOp, tokens: Tensor, weights: Tensor, ids: Tensor, own: Tensor, first: int, **kwargs: Any) -> Tensor:
    """A layer over ranks."""
    received = autograd.dispatch(op, tokens, weights, ids, **kwargs)
    assert received.weights is not None
    return autograd.combine(op, experts_on(received.rows, received.weights, received.ids, own, first), received)


def grouped(op: BaseOp, tokens: Tensor, weights: Tensor, ids: Tensor, own: Tensor, first: int, **kwargs: Any) -> Tensor:
    """The same layer, whose experts' products leave NaN behind their last row, in results and gradients."""
    received = autograd.dispatch(op, tokens, weights, ids, **kwargs)
    groups = autograd.group(op, received, exact="max_num_tokens" not in kwargs)
    groups.rows.register_hook(lambda grad: torch.where(groups.valid[:, None], grad, torch.nan))
    *parts, rest = groups.rows.tensor_split(groups.ends.tolist())
    results = [torch.tanh(product(rows, expert)) for rows, expert in zip(parts, own, strict=True)]
    results.append(torch.full_like(rest, torch.nan))
    return autograd.combine(op, autograd.ungroup(torch.cat(results), groups, received), received)


def product(rows: Tensor, expert: Tensor) -> Tensor:
    """Rows times an expert. Rounding hides in which order a library adds: that may depend on the number of rows."""
    return (rows.double() @ expert.double()).to(rows.dtype)


def experts_on(rows: Tensor, weights: Tensor, ids: Tensor, experts: Tensor, first: int = 0) -> Tensor:
    results = torch.zeros_like(rows)
    for number in range(len(experts)):
        gate = (weights * (ids == first + number)).sum(-1, keepdim=True)
        results = results + gate * torch.tanh(product(rows, experts[number]))
    return results


def dense_grads(given: Inputs, group: Any, factor: int = 1) -> tuple[Tensor, list[Tensor]]:
    """The result of dense layers, and the gradients of its `loss` for tokens, weights and the rank's own experts."""
    leaves = [each.detach().clone().requires_grad_() for each in (given.tokens, given.weights, given.experts)]
    result = factor * experts_on(leaves[0], leaves[1], given.ids, leaves[2])
    grads = list(torch.autograd.grad(loss(result), leaves))
    of_all = grads[2].cpu()
    dist.all_reduce(of_all, group=group)
    grads[2] = of_all.to(grads[2].device)[given.first : given.first + len(given.own)]
    return result.detach(), grads


def loss(result: Tensor) -> Tensor:
    return (result * torch.linspace(-1, 1, result.shape[-1], device=result.device)).sum()


def agree(got: list[Tensor], want: list[Tensor]) -> None:
    for each, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5)


def uneven(rank: int) -> int:
    """Tokens of a rank: none on rank 1."""
    return (5, 0, 6, 1, 4)[rank]


def dense(context: RankContext, layout: str) -> None:
    """A layer and its gradients are those of the dense layer, to the bit in every run, also with bounds by rank."""
    with make(context, layout=layout) as op:
        given = Inputs.of(op, uneven(context.rank))
        bounds = [uneven(rank) for rank in range(context.world_size)]
        want, want_grads = dense_grads(given, context.group)
        args = given.args
        first = {}
        for layer, step_tokens in itertools.product((moe, grouped), (None, MAX_TOKENS, bounds, bounds)):
            result = layer(op, *args, **({} if step_tokens is None else {"max_num_tokens": step_tokens}))
            grads = torch.autograd.grad(loss(result), given.leaves)
            agree([result, *grads], [want, *want_grads])
            first.setdefault(layer, grads[:2])
            assert all(map(torch.equal, grads, first[layer]))
            assert not op.has_open_step
            # calls of the op itself go on beside
            with torch.no_grad():
                rows = op.dispatch(given.tokens, None, None, given.ids).tokens
                op.combine(rows, None, None)


def slots(context: RankContext, layout: str) -> None:
    """With reduction="slots" bits are those of slots added one by one on one rank, whatever the number of ranks."""
    num_experts, dtype = 7, torch.bfloat16
    sizes = {"topk": 1, "max_tokens": TOPK * MAX_TOKENS, "num_experts": num_experts, "dtype": dtype, "layout": layout}
    with make(context, **sizes) as op:
        drawn = torch.Generator().manual_seed(context.rank)
        tokens, weights = (torch.randn(uneven(context.rank), size, generator=drawn) for size in (HIDDEN, TOPK))
        ids = torch.rand(len(tokens), num_experts, generator=drawn).topk(TOPK).indices.int()
        ids[::2, 1], ids[3:4], ids[1:2] = -1, num_experts, 2
        leaves = [each.to(op.device).requires_grad_() for each in (tokens.to(dtype), weights)]
        ids = ids.to(op.device)

        def expert(rows: Tensor, own: Tensor) -> Tensor:
            """Elementwise, so that a row's bits depend on nothing else."""
            return rows * (own + 0.3).to(dtype)[:, None] + rows * rows

        wide = leaves[0].float()
        total = torch.zeros_like(wide)
        for slot in range(TOPK):
            own, weight = ids[:, slot], leaves[1][:, slot, None]
            product = (expert(wide.to(dtype), own) * weight).to(dtype)
            total = total + torch.where(((own >= 0) & (own < num_experts))[:, None], product, 0).float()
        want = total.to(dtype)
        want_grads = torch.autograd.grad(loss(want), leaves)
        bounds = [uneven(rank) for rank in range(context.world_size)]
        for step_tokens in (None, MAX_TOKENS, bounds):
            received = autograd.dispatch(op, *leaves, ids, step_tokens=step_tokens, reduction="slots")
            groups = autograd.group(op, received)
            results = expert(groups.rows, received.ids[groups.order, 0])
            result = autograd.combine(op, autograd.ungroup(results, groups, received), received)
            grads = torch.autograd.grad(loss(result), leaves)
            assert torch.equal(result, want)
            assert torch.equal(grads[0], want_grads[0])
            # torch may add a row's products in another order for another number of rows
            agree([grads[1]], [want_grads[1]])


def rows_without_a_token(context: RankContext) -> None:
    """They are zeros both ways, and may hold anything for combine. Without weights there are none."""
    with make(context) as op:
        given = Inputs.of(op, uneven(context.rank))
        received = autograd.dispatch(op, given.tokens, None, given.ids)
        assert received.weights is None
        num_rows = int(received.num_rows)
        assert len(received.rows) == MAX_TOKENS * context.world_size > num_rows
        assert not received.rows[num_rows:].any()
        assert (received.ids[num_rows:] == -1).all()
        rows = received.rows.detach().clone()
        rows[num_rows:] = torch.nan
        result = autograd.combine(op, rows.requires_grad_(), received)
        (grad,) = torch.autograd.grad(result.sum(), rows, retain_graph=True)
        assert (grad[:num_rows] == 1).all()
        assert not grad[num_rows:].any()
        # what does not reach the rows reaches the dispatch: all ranks run its backward
        torch.autograd.grad(result.sum(), given.tokens, allow_unused=True)


def several(context: RankContext, frozen: str) -> None:
    """An unused dispatch beside two equal layers, each rank with other frozen inputs."""
    with make(context) as op:
        given = Inputs.of(op, uneven(context.rank))
        _, want = dense_grads(given, context.group, 2)
        first = {"inputs": context.rank, "all": 0, "none": 3}[frozen]
        for leaf in given.leaves[first:] if frozen == "inputs" else given.leaves[first:3]:
            leaf.requires_grad_(False)
        two_layers(op, given).backward()
        agree([each.grad for each in given.leaves if each.grad is not None], want[: len(want) if first > 2 else first])


def two_layers(op: BaseOp, given: Inputs) -> Tensor:
    autograd.dispatch(op, given.tokens, given.weights, given.ids)
    layer = functools.partial(moe, op, *given.args)
    return loss(layer() + layer())


def halves(context: RankContext) -> None:
    """A combine takes up the step of its dispatch; a step that something displaces is repeated, none stays open."""
    manager = ep_a2a.create_manager("ep_a2a", context.group)
    manager.device = context.device
    case = Case(context.world_size, HIDDEN, TOPK, 2 * context.world_size, MAX_TOKENS, torch.float32)
    # two ops in the same memory
    op, other = (
        manager.get_handle(kwargs_of(replace(case, layout=layout), context.rank))
        for layout in ("compact", "rank_major")
    )
    given = Inputs.of(op, uneven(context.rank))
    result, want = dense_grads(given, context.group)
    calls: list[str] = []

    def layer(between: Callable[[], object]) -> None:
        """Runs `between` between all calls of a layer."""

        def in_backward(_: Tensor) -> None:
            between()

        received = autograd.dispatch(op, given.tokens, given.weights, given.ids)
        assert received.weights is not None
        assert op.open_step is None
        between()
        rows = experts_on(received.rows, received.weights, received.ids, given.own, given.first)
        combined = autograd.combine(op, rows, received)
        between()
        rows.register_hook(in_backward)
        agree([combined, *torch.autograd.grad(loss(combined), given.leaves)], [result, *want])

    def inference() -> None:
        with torch.no_grad():
            op.combine(op.dispatch(given.tokens, None, None, given.ids).tokens, None, None)

    def refused_rows() -> None:
        with pytest.raises(errors.ShapeError):
            autograd.combine(op, given.tokens.new_zeros(1, HIDDEN), autograd.dispatch(op, *unrouted))

    def in_turn() -> None:
        received = autograd.dispatch(other, *unrouted)
        autograd.combine(other, received.rows, received)

    unrouted = given.tokens, given.weights, torch.full_like(given.ids, -1)
    for each in (op, other):
        for name in ("dispatch", "combine"):
            setattr(each, name, functools.partial(_noting, getattr(each, name), name[0], calls))
    for between, expected in (
        (lambda: None, "dcdc"),
        (lambda: autograd.dispatch(op, *unrouted), "dcdcdcdcdcdcdc"),
        (lambda: autograd.dispatch(other, *unrouted), "dcdcdcdcdcdcdc"),
        (in_turn, "dcdcdcdcdcdcdc"),
        (inference, "dcdcdcdcdcdcdc"),
        (refused_rows, "dcdcdcdcdcdcdc"),
        (lambda: op.reset(), "ddcddc"),
    ):
        calls.clear()
        layer(between)
        assert "".join(calls) == expected, (expected, calls)
    manager.destroy()


def _noting(call: Callable[..., Any], name: str, calls: list[str], *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    calls.append(name)
    return result


def on_another_backend(context: RankContext, backend: str, num_nodes: int) -> None:
    """A layer on ops of other backends, and between nodes."""
    with ep_a2a.create_manager(backend, context.group) as manager:
        manager.device = context.device
        case = Case(context.world_size, HIDDEN, TOPK, 2 * context.world_size, MAX_TOKENS, torch.float32)
        per_node = context.world_size // num_nodes
        op = manager.get_handle(kwargs_of(case, context.rank, gpu_per_node=per_node))
        given = Inputs.of(op, uneven(context.rank))
        result, want = dense_grads(given, context.group)
        combined = moe(op, *given.args)
        agree([combined, *torch.autograd.grad(loss(combined), given.leaves)], [result, *want])
        del op


def cast(context: RankContext, quant: str, combine_quant: str) -> None:
    """Rows travel in fp8, gradients as they are: a layer of rounded tokens, in memory that the two ops share."""
    with ep_a2a.create_manager("ep_a2a", context.group) as manager:
        manager.device = context.device
        case = Case(context.world_size, 128, TOPK, 2 * context.world_size, MAX_TOKENS, torch.float32)
        back = manager.get_handle(kwargs_of(case, context.rank))
        num_bytes = manager.num_buffer_bytes
        changes = {"quant_dtype": FP8_DTYPE, "dispatch_quant_type": quant, "quant_type": combine_quant}
        op = manager.get_handle(kwargs_of(case, context.rank, **changes))
        # the op's own control, and its low-latency region
        assert manager.num_buffer_bytes < 2 * num_bytes
        given = Inputs.of(op, uneven(context.rank))
        rounded = dequantize(*quantize(given.tokens.detach(), quant), quant)
        result, want = dense_grads(replace(given, tokens=rounded), context.group)
        layers = [moe(op, *given.args, back=back) for _ in range(2)]
        for combined in layers:
            grads = torch.autograd.grad(loss(combined), given.leaves)
            agree(list(grads), want)
            tolerance = 1e-5 if combine_quant == "none" else 7e-2
            torch.testing.assert_close(combined, result, rtol=tolerance, atol=tolerance)
        del op, back


def skipped_experts(context: RankContext) -> None:
    """A rank whose experts take no part in its graph runs backward with the others."""
    with make(context) as op:
        given = Inputs.of(op, uneven(context.rank))
        received = autograd.dispatch(op, given.tokens, given.weights, given.ids)
        rows = received.rows if context.rank == 0 else torch.zeros_like(received.rows)
        result = autograd.combine(op, rows, received)
        result.sum().backward()
        owned_by_first = (given.ids >= 0) & (given.ids < 3)
        want = owned_by_first.any(-1, keepdim=True).float().expand(-1, HIDDEN)
        assert torch.equal(given.tokens.grad, want)


def checkpointed(context: RankContext, reentrant: bool) -> None:
    """Layers that recompute their forward in backward."""
    with make(context) as op:
        given = Inputs.of(op, uneven(context.rank))
        _, want = dense_grads(given, context.group, 2)
        args = given.args
        layers = [functools.partial(moe, op, tag=tag) for tag in (1, 2)]
        loss(sum(checkpoint(layer, *args, use_reentrant=reentrant) for layer in layers)).backward()
        agree([leaf.grad for leaf in given.leaves], want)


def another_order(context: RankContext) -> None:
    """Ranks whose backward takes layers in another order are told the tags."""
    with make(context) as op:
        given = Inputs.of(op, 2)
        args = given.args
        results = [moe(op, *args, tag=tag).sum() for tag in (1, 2)]
        with pytest.raises(errors.ConfigMismatchError, match="tag"):
            backward(op, results[context.rank])
        dist.barrier(context.group)
        op.reset()


def on_one_rank(context: RankContext) -> None:
    """A backward on one rank alone ends with the name of the others."""
    with make(context) as op:
        given = Inputs.of(op, 2)
        total = moe(op, *given.args).sum()
        op.set_timeout(1.0)
        if context.rank == 0:
            with pytest.raises(errors.RankTimeoutError, match="rank 1") as error:
                backward(op, total)
            assert error.value.late_ranks == (1,)
        dist.barrier(context.group)
        op.reset()


def killed_before_backward(context: RankContext, folder: str) -> None:
    """The other rank's backward names the dead one, and writes it down."""
    with make(context) as op:
        total = moe(op, *Inputs.of(op, 2).args).sum()
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(errors.RankTimeoutError, match="rank 1") as error:
            backward(op, total)
        Path(folder, "missing").write_text(str(error.value.missing_ranks))


def backward(op: BaseOp, total: Tensor) -> None:
    """Backward, and the error that the device finds in it."""
    total.backward()
    if op.device.type == "cuda":
        torch.cuda.synchronize()
    op.check()


def refusals(context: RankContext) -> None:
    """Errors that a rank finds by itself, each of one line."""
    row = torch.zeros(1, HIDDEN), None, torch.zeros(1, TOPK)
    cast = make(context, quant="fp8_per_token", dtype=torch.bfloat16)
    static = make(context, quant="fp8_static", dtype=torch.bfloat16, hidden_size=128)
    with static, refused(errors.UnsupportedError, "without a given scale.* fp8_static.* Make another op"):
        autograd.dispatch(static, *row)
    with cast, refused(errors.UnsupportedError, "beside one with casts.* fp8_per_token.* Pass back="):
        autograd.dispatch(cast, *row)
    by_expert = make(context, layout="expert_major")
    with by_expert, refused(errors.UnsupportedError, "layout compact or rank_major.* by ep_a2a.autograd.group"):
        autograd.dispatch(by_expert, *row)
    op = make(context)
    with refused(errors.UnsupportedError, "back of the op's data_type torch.bfloat16; got torch.float32. Pass an op"):
        autograd.dispatch(cast, *row, back=op)
    with refused(errors.UnsupportedError, 'topk 1 for reduction="slots"; got topk 3. Make one'):
        autograd.dispatch(op, *row, reduction="slots")
    by_slot = make(context, topk=1)
    with by_slot, refused(errors.ShapeError, r"ids of shape \[T, K\]; got \(1,\)"):
        autograd.dispatch(by_slot, row[0], None, torch.zeros(1), reduction="slots")
    with refused(errors.UnknownNameError, "reduction ranks or slots; got 'slot'"):
        autograd.dispatch(op, *row, reduction="slot")
    given = Inputs.of(op, 2)
    args = given.args
    (grad,) = torch.autograd.grad(loss(moe(op, *args)), given.tokens, create_graph=True)
    with refused(errors.UnsupportedError, "first derivatives .* create_graph"):
        grad.sum().backward()
    with refused(errors.EpA2AError, "indices of dtype torch.int32"):
        autograd.dispatch(op, given.tokens, given.weights, given.ids.float().requires_grad_())
    with make(context) as other, refused(errors.InputError, "the op of the dispatch; got another.* Pass the one"):
        received = autograd.dispatch(op, *args[:3])
        autograd.combine(other, received.rows, received)
    with refused(errors.EpA2AError, "step_tokens, or its older name"):
        moe(op, *args, step_tokens=3, max_num_tokens=3)
    with refused(errors.InputError, "one integer, or 2, one for each rank; got 1 of them"):
        autograd.dispatch(op, *args[:3], step_tokens=[3])
    nothing: Any = None
    with refused(errors.InputError, "received as of ep_a2a.autograd.dispatch; got NoneType. Pass"):
        autograd.combine(op, given.tokens, nothing)
    with refused(errors.InputError, "an op; got NoneType. Make one"):
        autograd.dispatch(nothing, *args[:3])
    result = moe(op, *args)
    op.close()
    with refused(errors.ClosedError, "an open op; got a closed one. Close it behind"):
        result.sum().backward()
    with refused(errors.ClosedError, "got a closed one"):
        moe(op, *args)
    op = make(context)
    result = moe(op, *args)
    dist.barrier(context.group)
    op.close()
    del op
    with refused(errors.ClosedError, "got a closed one"):
        result.sum().backward()


@contextlib.contextmanager
def refused(kind: type[Exception], match: str) -> Iterator[None]:
    with pytest.raises(kind, match=match) as error:
        yield
    assert len(str(error.value).splitlines()) == 2  # the last names the section of the documentation


def operators(context: RankContext) -> None:
    """torch's own checks of each operator, which calls all of them alike on every rank."""
    with make(context) as op:
        given = Inputs.of(op, 5 - context.rank)
        tokens, weights = given.tokens, given.weights
        most = MAX_TOKENS * context.world_size
        rows, row_weights = torch.randn(most, HIDDEN, device=op.device), torch.randn(most, TOPK, device=op.device)
        given_back = op.number, [MAX_TOKENS], most, 0
        numbers = [op.number, op.number], *given_back[1:]
        link, token = tokens.detach().new_empty(0), given.ids.new_zeros(1)
        calls = torch.ops.ep_a2a
        frozen = tokens.detach()
        for operator, args in (
            (calls.dispatch, (tokens, weights, given.ids, autograd.ANCHOR, *numbers)),
            (calls.dispatch, (frozen, None, given.ids, autograd.ANCHOR, *numbers)),
            (calls.combine, (rows.clone().requires_grad_(), given.ids, token, link, *numbers)),
            (calls.dispatch_backward, (rows, row_weights, given.ids, token, op.number, [MAX_TOKENS], 0)),
            (calls.combine_backward, (frozen, given.ids, token, *given_back)),
        ):
            torch.library.opcheck(operator.default, args)


def compiled(context: RankContext, backend: str, dynamic: bool) -> None:
    """Two layers and an unused dispatch in one graph: results, gradients, and the order of calls in backward."""
    import torch._dynamo

    torch._dynamo.reset()
    with make(context) as op:
        calls = noted_calls()

        def layers(tokens: Tensor, weights: Tensor, ids: Tensor, own: Tensor) -> Tensor:
            autograd.dispatch(op, tokens, weights, ids, tag=1)
            return moe(op, tokens, weights, ids, own, first, tag=2) + moe(op, tokens, weights, ids, own, first, tag=3)

        first = op.config.first_expert
        layer = torch.compile(layers, fullgraph=True, backend=backend, dynamic=dynamic)
        for step in range(2 if dynamic else 1):
            given = Inputs.of(op, 5 - context.rank - step, seed=step)
            want, want_grads = dense_grads(given, context.group, 2)
            calls.clear()
            result = layer(given.tokens, given.weights, given.ids, given.own)
            grads = torch.autograd.grad(loss(result), given.leaves)
            agree([result, *grads], [want, *want_grads])
            assert " ".join(calls) == "send1 send2 bring_back2 send3 bring_back3 send3 bring_back3 send2 bring_back2"


def compiled_first(context: RankContext) -> None:
    """The first call of an op is that of a graph, which has all of a layer."""
    torch._dynamo.reset()
    for changes, reduction in (({}, "ranks"), ({"topk": 1, "max_tokens": MAX_TOKENS * TOPK}, "slots")):
        with make(context, **changes) as op:
            tokens = torch.ones(4, HIDDEN, device=op.device, requires_grad=True)
            ids = torch.arange(4 * TOPK, dtype=torch.int32, device=op.device).view(4, TOPK) % 3

            def layer(tokens: Tensor, ids: Tensor, op: BaseOp = op, reduction: str = reduction) -> Tensor:
                received = autograd.dispatch(op, tokens, None, ids, reduction=reduction)
                groups = autograd.group(op, received)
                return autograd.combine(op, autograd.ungroup(groups.rows, groups, received), received)

            result = torch.compile(layer, fullgraph=True, backend="aot_eager")(tokens, ids)
            result.sum().backward()
            torch.testing.assert_close(result, TOPK * tokens)
            torch.testing.assert_close(tokens.grad, torch.full_like(tokens, TOPK))


def compiled_once(context: RankContext, backend: str) -> None:
    """One compiled layer on two ops, without gradients, and in a checkpoint that saves what was received."""
    import torch._dynamo

    torch._dynamo.reset()
    layer = torch.compile(moe, fullgraph=True, backend=backend)
    saved = [torch.ops.ep_a2a.dispatch.default, torch.ops.ep_a2a.combine.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)

    @torch.compile(fullgraph=True, backend=backend)
    def in_a_checkpoint(*args: Any) -> Tensor:
        return checkpoint(moe, *args, use_reentrant=False, context_fn=contexts)

    with make(context) as op, make(context) as other:
        for each in (op, other, op):
            given = Inputs.of(each, uneven(context.rank))
            result, want = dense_grads(given, context.group)
            args = each, *given.args
            for form in (layer, in_a_checkpoint):
                combined = form(*args)
                agree([combined, *torch.autograd.grad(loss(combined), given.leaves)], [result, *want])
            with torch.no_grad():
                agree([layer(*args)], [result])
            with torch.inference_mode():
                agree([layer(*args)], [result])


def saved(context: RankContext, budget: float) -> None:
    """A graph saves what exchanges return, also where it repeats other operators: for a checkpoint or a budget."""
    torch._dynamo.reset()
    calls = noted_calls()
    layer = functools.partial(checkpoint, moe, use_reentrant=False) if budget == 1 else moe
    with make(context) as op, functorch_config.patch(activation_memory_budget=budget):
        given = Inputs.of(op, uneven(context.rank))
        want, want_grads = dense_grads(given, context.group)
        for backend in ("aot_eager", "aot_eager_decomp_partition") if budget == 1 else ("aot_eager_decomp_partition",):
            calls.clear()
            result = torch.compile(layer, fullgraph=True, backend=backend)(op, *given.args)
            agree([result, *torch.autograd.grad(loss(result), given.leaves)], [want, *want_grads])
            assert calls == ["send0", "bring_back0"] * 2


def tagged(context: RankContext) -> None:
    """Layers that differ in their tag alone share graphs, also if there are more of them than torch compiles anew."""

    class Layer(torch.nn.Module):
        def __init__(self, tag: int) -> None:
            super().__init__()
            self.tag = tag

        def forward(self, *args: Any) -> Tensor:
            return moe(op, *args, tag=self.tag)

    torch._dynamo.reset()
    calls = noted_calls()
    layers = [Layer(tag) for tag in range(1 + torch._dynamo.config.recompile_limit)]
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    with make(context) as op:
        given = Inputs.of(op, uneven(context.rank))
        want, want_grads = dense_grads(given, context.group)
        for layer in layers:
            calls.clear()
            result = layer(*given.args)
            agree([result, *torch.autograd.grad(loss(result), given.leaves)], [want, *want_grads])
            assert calls == [f"send{layer.tag}", f"bring_back{layer.tag}"] * 2


def captured(context: RankContext) -> None:
    """Forward and backward of two layers in one CUDA graph, replayed with other inputs."""
    with make(context) as op:
        given = Inputs.of(op, uneven(context.rank))

        def step() -> list[Tensor]:
            args = given.args
            result = moe(op, *args) + moe(op, *args)
            return [result, *torch.autograd.grad(loss(result), given.leaves)]

        for _ in range(2):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step()
        for seed in range(3):
            other = Inputs.of(op, uneven(context.rank), seed)
            given.experts = other.experts
            for mine, new in zip([*given.leaves, given.ids], [*other.leaves, other.ids], strict=True):
                mine.detach().copy_(new.detach())
            graph.replay()
            torch.cuda.synchronize()
            want, want_grads = dense_grads(given, context.group, 2)
            agree(got, [want, *want_grads])
        agree(step(), [want, *want_grads])


def noted_calls() -> list[str]:
    """The calls of operators from now on, with tags."""
    calls: list[str] = []
    kind: Any = autograd._Exchange

    def note(name: str) -> Callable[..., Any]:
        real = getattr(kind, name)
        real = getattr(real, "noted", real)

        def call(self: Any, *args: Any) -> Any:
            calls.append(f"{name}{self.tag}")
            return real(self, *args)

        call.noted = real  # type: ignore[attr-defined]
        return call

    for name in ("send", "bring_back"):
        setattr(kind, name, note(name))
    return calls
