"""One data-parallel rank of a measured engine: `python -m bench.vllm.rank FOLDER RANK`."""

import random
from pathlib import Path
from typing import Any

from bench.vllm.probe import WARM_STEPS, fetch, watch
from tests.engines.vllm.gpu.rank import Rank, main
from tests.engines.vllm.models import fill_dummy_weights

PROMPT_TOKENS = 16
"""Of each sequence that decodes."""


class MeasuredRank(Rank):
    """The actions of bench/vllm. All ranks do the same ones."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank)
        self.llm.apply_model(fill_dummy_weights)
        self._chosen = random.Random(rank)

    def decode(self, num_sequences: int, num_layers: int, num_replays: int, num_steps: int) -> dict[str, Any]:
        """Replays and profiles the decode step of `num_sequences` sequences per rank."""
        prompts = self._prompts([PROMPT_TOKENS] * num_sequences)
        return self._watched(prompts, WARM_STEPS + num_steps + 2, num_layers, num_replays, num_steps)

    def prefill(self, lengths: list[list[int]], num_layers: int, rounds: int) -> dict[str, Any]:
        """Times and profiles the step of prompts with these lengths, by rank."""
        own = lengths[self.rank]
        self._generate(self._prompts(own), 1)
        secs = [self._generate(self._prompts(own), 1)[1] for _ in range(rounds)]
        return self._watched(self._prompts(own), 1, num_layers) | {"us": [1e6 * each for each in secs]}

    def _watched(self, prompts: list[list[int]], num_tokens: int, num_layers: int, *numbers: int) -> dict[str, Any]:
        """Completes prompts, and returns what the worker has measured meanwhile."""
        self._settle()
        step_tokens = len(prompts) if num_tokens > 1 else sum(map(len, prompts))
        self.llm.collective_rpc(watch, args=(step_tokens, num_layers, *numbers))
        self._generate(prompts, num_tokens)
        self._settle()
        found: dict[str, Any] = self.llm.collective_rpc(fetch)[0]
        return found

    def _prompts(self, lengths: list[int]) -> list[list[int]]:
        return [self._prompt(self._chosen, length) for length in lengths]


if __name__ == "__main__":
    main(MeasuredRank)
