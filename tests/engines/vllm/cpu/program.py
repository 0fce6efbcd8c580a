"""One data-parallel rank of a real vLLM engine on CPU: generates its share of the prompts and writes what came out.

    python -m tests.engines.vllm.cpu.program FOLDER RANK

VLLM_DP_* say to vLLM which rank this is. Reads FOLDER/job, JSON of the `model` and the `options`, and writes the
completions by number of the prompt to FOLDER/RANK.json.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.vllm.cpu.changes import EXTENSION, Changes
from tests.engines.vllm.trained import known_prompts

NUM_TOKENS = 12
PROMPTS, FOLLOWING = map(list, zip(*known_prompts(6, NUM_TOKENS)))
NUM_TOP = 5
"""The likeliest tokens of a step, whose log probabilities are kept: those of the unlikely ones show the least error."""
MAX_BATCHED_TOKENS = 128


@dataclass(frozen=True)
class Options:
    """An engine, and what its ranks do.

    Attributes:
        expert_parallel: also of one rank; several are expert-parallel anyway.
        tensor_parallel: workers of a rank, processes of their own. pipeline_parallel: stages, each of so many workers.
        num_tokens: that a prompt goes on with, at most.
        compiled: torch.compile, as by default, in place of eager.
        chunk: the most tokens of a step; below the default prefixes are cached, and everything is generated twice.
        batched, ranks_per_node: see `Changes`.
        routed: what the layers are given lies beside the results (`Changes.routed`).
        stop: all generate again, and the last rank stops in that; what comes out then is in RANK.json.again.
    """

    expert_parallel: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    num_tokens: int = NUM_TOKENS
    dtype: str = "float32"
    compiled: bool = False
    chunk: int = MAX_BATCHED_TOKENS
    batched: bool = False
    ranks_per_node: int = 0
    routed: bool = False
    stop: bool = False


def main(folder: Path, rank: int) -> None:
    job = json.loads((folder / "job").read_text())
    model, options, result = job["model"], Options(**job["options"]), folder / f"{rank}.json"
    size = int(os.environ.get("VLLM_DP_SIZE", "1"))
    stop_file = result.with_name("stop")
    changes = Changes(
        rank=size * options.tensor_parallel - 1,
        stop_file=str(stop_file) if options.stop else "",
        ranks_per_node=options.ranks_per_node,
        routed=str(result.parent) if options.routed else "",
        batched=options.batched,
    )
    # for workers that are made from here on
    os.environ.update(changes.variables())
    llm = make_engine(model, options, expert_parallel=size > 1 or options.expert_parallel)
    if options.pipeline_parallel > 1:
        # on CPU, vLLM's warm-up of an eager engine leaves out what later stages receive hidden states into
        llm.collective_rpc("execute_dummy_batch")

    def results() -> dict[str, Any]:
        return dict(zip(map(str, range(rank, len(PROMPTS), size)), generate(llm, PROMPTS[rank::size], rank, options)))

    if options.chunk < MAX_BATCHED_TOKENS:
        results()  # whose prefixes are cached for the next one
    result.write_text(json.dumps(results()))
    if options.stop:
        stop_file.touch()
        result.with_suffix(".json.again").write_text(json.dumps(results()))


def make_engine(model: str, options: Options, *, expert_parallel: bool) -> Any:
    from vllm import LLM
    from vllm.config import SchedulerConfig

    # on CPU vLLM raises the limit of some models to this, and warms up with that many tokens
    SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS = options.chunk
    backend = "ep_a2a_low_latency" if options.batched else "ep_a2a"
    parallel = {"enable_expert_parallel": True, "all2all_backend": backend} if expert_parallel else {}
    return LLM(
        model,
        skip_tokenizer_init=True,
        dtype=options.dtype,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=options.chunk,
        enforce_eager=not options.compiled,
        seed=0,
        enable_prefix_caching=options.chunk < MAX_BATCHED_TOKENS,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
        tensor_parallel_size=options.tensor_parallel,
        pipeline_parallel_size=options.pipeline_parallel,
        # of the two for MLA the other one, which vLLM prefers where the processor has AMX, takes no float32
        attention_backend="CPU_MLA",
        distributed_executor_backend="uni" if options.tensor_parallel == options.pipeline_parallel == 1 else "mp",
        worker_extension_cls=EXTENSION,
        **parallel,
    )


def generate(llm: Any, prompts: list[list[int]], rank: int, options: Options) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    # not as many steps on all ranks, so that some run steps without tokens at the end
    num_tokens = options.num_tokens - 2 * (rank % 2)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=NUM_TOP, detokenize=False)
    completions = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [_as_numbers(each.outputs[0]) for each in completions]


def _as_numbers(completion: Any) -> dict[str, Any]:
    """Its tokens, and each step's likeliest tokens with their log probabilities."""
    logprobs = [{str(token): each.logprob for token, each in step.items()} for step in completion.logprobs]
    return {"tokens": list(completion.token_ids), "logprobs": logprobs}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
