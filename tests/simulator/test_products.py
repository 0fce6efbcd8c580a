"""No product of 32 bits becomes part of an address where it grows with the rows, tokens and widths of an op."""

import linecache
from pathlib import Path

import pytest

from tests.simulator.interpreter import KERNELS
from tests.simulator.products import narrow_products
from tests.simulator.runs import CONDITIONS, run

RUNS = (
    ("low_latency_compact", "steps"),
    ("low_latency_strides", "steps"),
    ("bulk", "steps"),
    ("bulk_compact", "steps"),
    ("bulk_look_back", "steps"),
    ("bounded_compact_cast", "steps"),
    ("expert_major", "late_weights"),
    ("fp8_results", "steps"),
    ("fp8", "steps"),
    ("small_room", "behind_failure"),
    ("rings", "steps"),
    ("rings_by_puts", "steps"),
    ("staged", "steps"),
)
SMALL_PRODUCTS = """
rank, node and channel numbers, times each other:
count_words + source * (op.WORLD_SIZE + 2)
lanes * (op.WORLD_SIZE + 2)
rank * (op.WORLD_SIZE + 2)
source * (op.WORLD_SIZE + 2)
sources[:, None] * (op.WORLD_SIZE + 2)
rank // R.GPUS) * R.GPUS
node * R.GPUS + rank % R.GPUS
node * R.GPUS + op.rank % R.GPUS
rank // GPUS * GPUS + peer % GPUS
node * GPUS + rank % GPUS
peer * R.GPUS + op.rank % R.GPUS
tl.where(nodes < R.NODES, nodes, 0) * R.GPUS + op.rank % R.GPUS
+ 2 * ring
channel * R.NODES
nodes * R.GPUS + op.rank % R.GPUS
+ (R.DIRECTION * R.CHANNELS + channel) * 2 * R.NODES
peer * R.GPUS
regions * op.WORLD_SIZE + peers
program * op.WORLD_SIZE + ranks
programs[:, None] * op.WORLD_SIZE + ranks[None, :]
chunk numbers of a step:
source_node * R.NUM_CHUNKS + chunk
channel + count * R.CHANNELS
row numbers, of which a rank has fewer than 2**31:
source * step.step_tokens
expert * block_rows + index
tl.cast(source * step_tokens + index, tl.int64)
places in a token's line of ranks:
is_sent - num_below + is_below * num_sent
elements of a tile, or of a row:
block_offsets(first * per_word
(lanes % B.GROUPS_LANES)[:, None] * B.GROUP
rows * B.WIDTH + elements
scales + (rows * num_scales + lines // per_scale)
rows * op.TOPK + slots
tl.arange(0, GROUPS_LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
groups[:, None, None] * op.ROW.GROUP + elements
groups[:, None, None] * words + (lanes // RUN
groups * words + runs
lanes // RUN * (2 * RUN)
tokens[:, None] * op.TOPK + choices[None, :]
% num_blocks) *
block * E.BLOCK_WORDS
nothing:
vector * 0 + value
copies[None, :, None] * 0
"""
"""What such products are, by part of their line, below what bounds them."""


@pytest.mark.parametrize(("case", "body"), RUNS)
def test_products_that_grow_with_an_op_have_64_bits(case, body):
    known = [line for line in SMALL_PRODUCTS.splitlines() if line and not line.endswith(":")]
    with narrow_products() as found:
        run(case, body, CONDITIONS["many-sms" if case.startswith("bounded") else "late"])
    unknown = []
    for place in sorted(found):
        file, line = place.split(":")
        text = linecache.getline(str(Path(KERNELS, file)), int(line)).strip()
        if not any(each in text for each in known):
            unknown.append(f"{place}: {text}")
    assert not unknown, "products of 32 bits in addresses:\n" + "\n".join(unknown)
