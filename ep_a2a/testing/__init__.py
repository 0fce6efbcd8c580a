"""Runs functions on several ranks, for this package's tests and for yours."""

from ep_a2a.testing.arguments import positive, rank_count, refused_in_one_line
from ep_a2a.testing.launch import RankFailure, RankPool, run_ranks
from ep_a2a.testing.worker import RankContext

__all__ = ["RankContext", "RankFailure", "RankPool", "positive", "rank_count", "refused_in_one_line", "run_ranks"]
