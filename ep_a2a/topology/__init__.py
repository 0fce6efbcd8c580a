"""Where the ranks of a group run: facts, which ranks form a node, and versions that can work together."""

from ep_a2a.topology.classification import Topology, classify
from ep_a2a.topology.facts import RankFacts, TopologyReport, gather_report, in_the_same_node_as

__all__ = ["RankFacts", "Topology", "TopologyReport", "classify", "gather_report", "in_the_same_node_as"]
