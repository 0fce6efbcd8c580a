"""One data-parallel rank of a real vLLM engine on GPUs: starts it and does what a job says.

    python -m tests.engines.vllm.gpu.rank FOLDER RANK

VLLM_DP_* say to vLLM which rank this is. Reads FOLDER/job.json and appends a line of JSON per action to
FOLDER/RANK.jsonl. All ranks do the same actions in the same order, and end when an engine has ended.
"""

import faulthandler
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.engines.vllm.processes import SHARED_VARIABLE
from tests.engines.vllm.trained import known_prompts
from tests.waiting import await_until

NUM_TOP = 5
"""Log probabilities kept per token: enough to see by how little a token was missed."""
FIRST_WORD = 2
"""Smaller tokens are the models' marks of begin and end."""


class Rank:
    """The engine of one rank, its way to meet the others, and the actions."""

    def __init__(self, folder: Path, rank: int) -> None:
        from vllm import LLM

        if SHARED_VARIABLE in os.environ:
            # Freeing memory waits for kernels, and an exchange among them may wait for this rank in turn. The engine's
            # process is forked from this one.
            torch.accelerator.empty_cache = torch.cuda.empty_cache = lambda: None
        job = json.loads((folder / "job.json").read_text())
        self.folder, self.rank, self.num_ranks, self.actions = folder, rank, job["num_ranks"], job["actions"]
        self.num_barriers = 0
        self.vocab_size = json.loads((Path(job["engine"]["model"]) / "config.json").read_text())["vocab_size"]
        self.llm = LLM(**job["engine"])

    def run(self) -> None:
        for action in self.actions:
            name, label = action.pop("action"), action.pop("label", "")
            result = getattr(self, name)(**action)
            with (self.folder / f"{self.rank}.jsonl").open("a") as file:
                file.write(json.dumps({"label": label} | result) + "\n")
            if "error" in result:
                # without its engine a rank cannot meet the others; whoever started this ends them
                sys.exit(result["error"])
        self._settle()

    # actions

    def tokens(self, num_prompts: int, num_tokens: int, longest: int = 100, *, known: bool = False) -> dict[str, Any]:
        """Greedy tokens with their log probabilities. Ranks get unlike numbers of prompts and of steps.

        known: prompts are those of trained.known_prompts.
        """
        mine = self._share(num_prompts, longest)
        if known:
            prompts = known_prompts(num_prompts, num_tokens)
            mine = {number: prompts[number][0] for number in mine}
        outputs, _ = self._generate(list(mine.values()), num_tokens - 3 * (self.rank % 2), NUM_TOP)
        completions = {
            number: {
                "tokens": list(output.outputs[0].token_ids),
                "top": [[[token, each.logprob] for token, each in step.items()] for step in output.outputs[0].logprobs],
            }
            for number, output in zip(mine, outputs, strict=True)
        }
        return {"completions": completions}

    def tokens_until_failure(self, num_prompts: int, num_tokens: int, few: int, file: str) -> dict[str, Any]:
        """Tokens of the same prompts as `tokens` as they come, until an error ends this rank's engine.

        Rank 0 makes `file` when each of its completions has `few` tokens; the rank that stops writes it again. Reports
        what came until then and after, the error, and how many seconds after the last writing it came. A rank whose
        engine has stopped stays here.
        """
        from vllm import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        engine, mine = self.llm.llm_engine, self._share(num_prompts)
        parameters = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        tokens: dict[int, list[int]] = {number: [] for number in mine}
        told = False

        def enqueue() -> None:
            for number, prompt in mine.items():
                engine.add_request(f"{number}", {"prompt_token_ids": prompt}, parameters)

        self._start_together(enqueue)
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
                if self.rank == 0 and not told and min(map(len, tokens.values())) >= few:
                    Path(file).touch()
                    told = True
        except EngineDeadError as error:
            # of an error that came before the file there is no time
            secs = time.time() - Path(file).stat().st_mtime if Path(file).exists() else math.inf
            return {"tokens": tokens, "error": str(error), "secs": secs}
        return {"tokens": tokens}

    def sleep(self, level: int) -> dict[str, Any]:
        """Puts the engine to sleep and wakes it up. Level 2 forgets the weights, so they are read again."""
        self._settle()
        self.llm.sleep(level=level)
        self._barrier()
        if level == 1:
            self.llm.wake_up()
            return {}
        self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights")
        self._barrier()
        self.llm.wake_up(tags=["kv_cache"])
        return {}

    def reload(self) -> dict[str, Any]:
        """Reads the weights again, after graphs were captured."""
        self._settle()
        self.llm.collective_rpc("reload_weights")
        return {}

    def split_steps(self) -> dict[str, Any]:
        """How many steps vLLM has split into micro-batches so far; see `Changes.counts_splits`."""
        self._settle()
        return {"workers": self.llm.collective_rpc("num_split_steps")}

    # how they do it

    def _share(self, num_prompts: int, longest: int = 100) -> dict[int, list[int]]:
        """This rank's prompts by number, among those that are the same in every engine."""
        chosen = random.Random(0)
        prompts = [self._prompt(chosen, chosen.randint(1, longest)) for _ in range(num_prompts)]
        mine = range(self.rank, num_prompts, self.num_ranks)
        return {number: prompts[number] for number in mine[: len(mine) - self.rank % 2]}

    def _prompt(self, chosen: random.Random, length: int) -> list[int]:
        return [chosen.randrange(FIRST_WORD, self.vocab_size) for _ in range(length)]

    def _generate(self, prompts: list[list[int]], num_tokens: int, num_top: int = 0) -> tuple[list[Any], float]:
        """Completions in the order of the prompts, and seconds from the first step on."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=num_top or None
        )

        def enqueue() -> None:
            if prompts:
                self.llm.enqueue([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)

        start = self._start_together(enqueue)
        outputs = self.llm.wait_for_completion(use_tqdm=False)
        return outputs, time.perf_counter() - start

    def _start_together(self, enqueue: Callable[[], None]) -> float:
        """Gives prompts to the engine and starts it. Returns when.

        All prompts are in all engines before one starts a step: what a batch consists of, on which rounding depends,
        does not depend on time.
        """
        self._barrier()
        self.llm.sleep(level=0)
        enqueue()
        self._barrier()
        start = time.perf_counter()
        self.llm.wake_up(tags=["scheduling"])
        return start

    def _settle(self) -> None:
        """Waits until no engine runs a step: one without requests goes on for up to 32 for the others' sake.

        A pause has come when all engines have agreed on it between two steps.
        """
        self._barrier()
        self.llm.sleep(level=0)
        self._barrier()
        self.llm.wake_up(tags=["scheduling"])
        self._barrier()

    def _barrier(self) -> None:
        """Waits for all ranks' front-ends, not for their engines. By files: nothing that an engine uses, too."""
        self.num_barriers += 1
        names = [self.folder / f"barrier.{self.num_barriers}.{rank}" for rank in range(self.num_ranks)]
        names[self.rank].touch()
        await_until(lambda: all(name.exists() for name in names), "a barrier of the ranks", math.inf)


def main(rank: type[Rank] = Rank) -> None:
    """Runs the rank that the command line names."""
    # whoever started this asks for the stacks when it does not end, also for those of processes forked from here
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    rank(Path(sys.argv[1]), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
