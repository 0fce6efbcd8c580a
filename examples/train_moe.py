"""Trains a small mixture-of-experts language model on the text of this repository, its experts spread over ranks.

python examples/train_moe.py --ranks 4 [--device cuda] [--steps 20] [--dense]

The model predicts the next byte. Each rank has an equal part of every batch and its own experts; all other parameters
are equal on all ranks, which add their gradients. So the losses do not depend on the number of ranks. --dense, on one
rank, computes the experts without ep_a2a, to compare with.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import ep_a2a
from ep_a2a import autograd
from ep_a2a.testing import RankContext, run_ranks

if TYPE_CHECKING:
    from ep_a2a.ops import EpDispatchCombineOp

HIDDEN, HEADS, LAYERS, EXPERTS, TOPK = 32, 4, 1, 8, 2
BATCH, LENGTH, RATE = 8, 4, 0.2
TIMEOUT_SECS = 600
"""More than steps take on busy processors: kernels run in an interpreter there."""
TEXT = Path(__file__).resolve().parents[1] / "docs"


class Experts(nn.Module):
    """The experts of one layer that this rank owns, of `EXPERTS` that are equal for any number of ranks."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self.first = first
        own = slice(first, first + count)
        self.up = nn.Parameter((torch.randn(EXPERTS, HIDDEN, 2 * HIDDEN) / HIDDEN**0.5)[own].clone())
        self.down = nn.Parameter((torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN) / (2 * HIDDEN) ** 0.5)[own].clone())

    def forward(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Of each row the weighted sum over these experts."""
        result = torch.zeros_like(rows)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            row, slot = torch.where(ids == self.first + number)
            hidden = functional.silu(rows[row] @ up) @ down
            result = result.index_add(0, row, weights[row, slot, None] * hidden)
        return result


class Block(nn.Module):
    """Causal attention, and a layer of experts. Without an op all experts are this rank's."""

    def __init__(self, op: EpDispatchCombineOp | None) -> None:
        super().__init__()
        self.op = op
        self.mix, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        own = (0, EXPERTS) if op is None else (op.config.first_expert, op.config.num_local_experts)
        self.experts = Experts(*own)

    def forward(self, x: Tensor) -> Tensor:
        """x: [sequences, LENGTH, HIDDEN], as the result."""
        query, key, value = self.mix(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        tokens = self.norms[1](x).flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(TOPK)
        return x + self.route(tokens, weights, ids.int()).view_as(x)

    def route(self, tokens: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The experts' results for each token."""
        if self.op is None:
            return self.experts(tokens, weights, ids)
        received = autograd.dispatch(self.op, tokens, weights, ids)
        return autograd.combine(self.op, self.experts(received.rows, received.weights, received.ids), received)


def train(context: RankContext, steps: int, dense: bool) -> list[float]:
    """Returns the loss of every step."""
    sequences = BATCH // context.world_size
    with ep_a2a.make_op(
        context.group,
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        topk=TOPK,
        max_tokens=sequences * LENGTH,
        dtype=torch.float32,
        device=context.device,
    ) as op:
        # equal on all ranks: each draws all experts and keeps its own
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block(None if dense else op) for _ in range(LAYERS)))
        model = nn.Sequential(nn.Embedding(256, HIDDEN), blocks, nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256))
        model.to(context.device)
        shared = [value for name, value in model.named_parameters() if ".experts." not in name]
        optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
        text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(TEXT.glob("*.md")))))
        losses = []
        for _ in range(steps):
            # all ranks draw the whole batch
            starts = torch.randint(len(text) - LENGTH, (BATCH,))[context.rank :: context.world_size]
            batch = torch.stack([text[start : start + LENGTH + 1] for start in starts]).to(context.device)
            logits = model(batch[:, :-1]).flatten(0, 1)
            # a part of the batch's mean: experts get gradients of all tokens, and the others' are added
            loss = functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum") / (BATCH * LENGTH)
            optimizer.zero_grad()
            loss.backward()
            for each in (*(value.grad for value in shared), total := loss.detach().clone()):
                added = each.cpu()
                dist.all_reduce(added, group=context.group)
                each.copy_(added)
            optimizer.step()
            losses.append(total.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small mixture-of-experts language model.")
    parser.add_argument(
        "--ranks", type=int, choices=[each for each in range(1, BATCH + 1) if BATCH % each == 0], default=4
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dense", action="store_true", help="on one rank: experts without ep_a2a")
    options = parser.parse_args()
    if options.dense and options.ranks > 1:
        parser.error(f"argument --ranks: expected 1 with --dense, got {options.ranks}")
    start = time.monotonic()
    losses = run_ranks(
        train, options.ranks, options.steps, options.dense, device=options.device, timeout_secs=TIMEOUT_SECS
    )[0]
    for step, loss in enumerate(losses):
        print(f"step {step}: loss {loss:.7f}")
    print(f"{options.ranks} ranks, {options.steps} steps, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
