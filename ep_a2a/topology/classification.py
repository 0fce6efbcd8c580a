"""Judges which ranks of a group form a node; pure, so that tests can make up any cluster."""

from collections import Counter
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import ConfigError
from ep_a2a.topology.facts import TopologyReport


@dataclass(frozen=True)
class Topology:
    """Nodes of a group, the same on every rank.

    Attributes:
        world_size: ranks of the group.
        node_of_rank: node of each rank; nodes are numbered by their lowest rank.
        num_nodes: nodes.
        ranks_per_node: ranks on each node.
        internode: whether there is more than one node.
        contiguous: whether each node's ranks follow one another.
        uneven: whether nodes differ in their number of ranks.
        on_one_host: whether the nodes are virtual ones of one host, whose ranks reach each other's memory.
        shared_memory_problem: which ranks of one node do not share /dev/shm, and why; None if all do.
        reason: one sentence: the nodes, and how they were found.
    """

    world_size: int
    node_of_rank: tuple[int, ...]
    num_nodes: int
    ranks_per_node: tuple[int, ...]
    internode: bool
    contiguous: bool
    uneven: bool
    on_one_host: bool
    shared_memory_problem: str | None
    reason: str

    @property
    def gpu_per_node(self) -> int:
        """Ranks of the largest node, the `gpu_per_node` of an EpDispatchCombineConfig."""
        return max(self.ranks_per_node)


def classify(report: TopologyReport, gpu_per_node: int | None = None) -> Topology:
    """Returns which ranks form a node. Pure.

    Ranks that share memory or a host form a node. Ranks of one host that do not share /dev/shm stay one node, with
    `shared_memory_problem` set for the caller to refuse; they never pass for two nodes.

    Args:
        report: the facts, from `gather_report`.
        gpu_per_node: None goes by the facts; a number makes nodes of that many ranks in rank order, the last with the
            rest. They may divide real nodes (virtual nodes), but not span two.

    Raises:
        ConfigError: `gpu_per_node` is below 1, or would put ranks of two hosts on one node.
    """
    found = _found_nodes(report)
    if gpu_per_node is None:
        return _topology(report, found, "found by host identity and a probe of /dev/shm")
    gpu_per_node = checked_integer("gpu_per_node", gpu_per_node, 1)
    wanted = tuple(rank // gpu_per_node for rank in range(len(found)))
    for one, other in combinations_with_replacement(range(len(found)), 2):
        if wanted[one] == wanted[other] and found[one] != found[other]:
            raise ConfigError(
                "to keep each node on one host",
                f"{gpu_per_node}, with ranks {one} ({report.ranks[one].hostname}) and {other} "
                f"({report.ranks[other].hostname}) on one node",
                "Pass a number that divides the real nodes, or None.",
                field="gpu_per_node",
            )
    if wanted == found:
        return _topology(report, found, f"found by a probe of /dev/shm, and the same with gpu_per_node={gpu_per_node}")
    return _topology(report, wanted, f"virtual, cut by gpu_per_node={gpu_per_node}; really {max(found) + 1} node(s)")


def _found_nodes(report: TopologyReport) -> tuple[int, ...]:
    """Node of each rank: ranks linked, directly or through others, by shared memory or a common host."""
    node_of = list(range(len(report.ranks)))
    for one, other in combinations(node_of.copy(), 2):
        linked = report.share_memory(one, other) or report.on_one_host(one, other)
        if linked and node_of[one] != node_of[other]:
            joined = min(node_of[one], node_of[other]), max(node_of[one], node_of[other])
            node_of = [joined[0] if node == joined[1] else node for node in node_of]
    numbers = sorted(set(node_of))
    return tuple(map(numbers.index, node_of))


def _topology(report: TopologyReport, node_of_rank: tuple[int, ...], how: str) -> Topology:
    counts, one_node = Counter(node_of_rank), (0,) * len(node_of_rank)
    ranks_per_node = tuple(counts[node] for node in range(len(counts)))
    uneven = len(set(ranks_per_node)) > 1
    contiguous = list(node_of_rank) == sorted(node_of_rank)
    size = f"{' and '.join(map(str, ranks_per_node))} ranks" if uneven else f"{ranks_per_node[0]} rank(s) each"
    order = "" if contiguous else ", their ranks interleaved"
    return Topology(
        world_size=len(node_of_rank),
        node_of_rank=node_of_rank,
        num_nodes=len(counts),
        ranks_per_node=ranks_per_node,
        internode=len(counts) > 1,
        contiguous=contiguous,
        uneven=uneven,
        on_one_host=max(_found_nodes(report)) == 0 and _shared_memory_problem(report, one_node) is None,
        shared_memory_problem=_shared_memory_problem(report, node_of_rank),
        reason=f"{len(counts)} node(s) of {size}{order}: {how}",
    )


def _shared_memory_problem(report: TopologyReport, node_of_rank: tuple[int, ...]) -> str | None:
    pairs = [
        (one, other)
        for one, other in combinations_with_replacement(range(len(node_of_rank)), 2)
        if node_of_rank[one] == node_of_rank[other] and not report.share_memory(one, other)
    ]
    if not pairs:
        return None
    one, other = pairs[0]
    first, second = report.ranks[one], report.ranks[other]
    ranks = ", ".join(str(rank) for rank in sorted({rank for pair in pairs for rank in pair}))
    if one == other:
        who = f"rank {one} ({first.hostname}) has no usable /dev/shm"
    else:
        who = (
            f"rank {one} ({first.hostname}, boot id {first.boot_id}) and rank {other} ({second.hostname}, boot id "
            f"{second.boot_id}) are on one node but do not share /dev/shm"
        )
    return f"{who}: {report.probe_failure(one, other)}; {len(pairs)} such pair(s) among ranks {ranks}"
