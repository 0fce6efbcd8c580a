"""Compares published times of other libraries between nodes with predicted ones.

Times are the authors' claims, read in their documents in 2026 (DeepEP: README and docs/legacy.md; pplx-garden:
docs/fabric-lib.md; NCCL: contrib/nccl_ep/README.md; MORI: README); none was measured by this project. All are for
DeepSeek-V3's shape and NICs of 400 Gb/s, eight GPUs per node.

Of published.csv, gb_per_s_row_bytes is empty where dispatch and combine are microseconds. Else they are GB/s, "logical"
ones, which count rows that stay in the token's own node; the column says how many bytes they count of a row of dispatch
(MORI's leave scales out), and times follow. nvlink_gb_per_s is the rate inside a node: for H800 the highest by DeepEP's
document; for MI300X and MI355X MORI's own figure for dispatch with eight GPUs, 307 and 345 GB/s, of which 7/8 leave the
GPU; else NVLINK_GB_PER_S of predict.py, where the column is empty.
"""

import csv
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ep_a2a.commands.plan.predict import BYTES_PER_US, NVLINK_GB_PER_S, Cluster, Copies, Shape, predict

Compared = dict[str, Any]
"""A published time beside the predicted one, as `plan --published --json` prints it."""
GPUS_PER_NODE = 8


@cache
def published_times() -> list[Compared]:
    """Returns two rows for each line of published.csv, one of dispatch and one of combine."""
    with (Path(__file__).parent / "published.csv").open(encoding="utf-8", newline="") as file:
        return [compared for line in csv.DictReader(file) for compared in _compare(line)]


def _compare(line: dict[str, str]) -> Iterator[Compared]:
    counted_bytes, copies = int(line["gb_per_s_row_bytes"] or 0), Copies(line["copies"])
    rate = float(line["nvlink_gb_per_s"] or NVLINK_GB_PER_S)
    cluster = Cluster(int(line["num_ranks"]) // GPUS_PER_NODE, GPUS_PER_NODE, nvlink_gb_per_s=rate)
    shape = Shape(int(line["num_tokens"]), casts=line["casts"] == "fp8", max_nodes=int(line["max_nodes"]))
    found = predict(cluster, shape, copies)
    # A logical bandwidth counts a rank's rows for all nodes, its own included.
    rows = found.copies * shape.num_tokens / BYTES_PER_US
    for phase, predicted_us, row_bytes in (
        ("dispatch", found.dispatch_us, counted_bytes),
        ("combine", found.combine_us, shape.combine_row_bytes),
    ):
        published_us = rows * row_bytes / float(line[phase]) if counted_bytes else float(line[phase])
        yield {
            "source": line["source"],
            "machine": line["machine"],
            "ranks": cluster.num_ranks,
            "tokens": shape.num_tokens,
            "copy_per": copies.value,
            "phase": phase,
            "published_us": round(published_us, 1),
            "predicted_us": round(predicted_us, 1),
            "error_percent": round((predicted_us / published_us - 1) * 100, 1),
        }


def nearest(num_tokens: int, copies: Copies) -> list[Compared]:
    """Returns the published times that are most like an exchange: nearest in tokens, of all numbers of nodes.

    With a copy per rank rows go straight to their GPUs, as with a copy per expert, of which there are published times.
    """
    like = [each for each in published_times() if (each["copy_per"] == Copies.NODE) == (copies is Copies.NODE)]
    tokens = min((each["tokens"] for each in like), key=lambda each: abs(math.log(each / num_tokens)))
    return [each for each in like if each["tokens"] == tokens]
