"""Runs functions on several ranks, for this package's tests and for yours."""

from ep_a2a.testing.launch import RankFailure, RankPool, run_ranks
from ep_a2a.testing.worker import RankContext

__all__ = ["RankContext", "RankFailure", "RankPool", "run_ranks"]
