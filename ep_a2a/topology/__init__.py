"""Finds the nodes of a group: facts about each rank, ranks that form a node, versions that can work together."""

from ep_a2a.topology.classification import Topology, classify
from ep_a2a.topology.facts import RankFacts, TopologyReport, gather_report, in_the_same_node_as

__all__ = ["RankFacts", "Topology", "TopologyReport", "classify", "gather_report", "in_the_same_node_as"]
