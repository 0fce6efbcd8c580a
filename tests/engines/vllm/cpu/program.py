"""One data-parallel rank of a real vLLM engine on CPU: generates its share of the prompts and writes what came out.

    python -m tests.engines.vllm.cpu.program MODEL RESULT.json [--expert-parallel] [--compiled] [--stop] [--routed]
        [--tensor-parallel WORKERS] [--pipeline-parallel STAGES] [--ranks-per-node RANKS] [--tokens NUMBER]
        [--dtype DTYPE] [--chunk TOKENS] [--batched]

VLLM_DP_* say which rank this is. MODEL is a folder of trained.trained_model. With --routed what the layers were given
lies beside the result (`Changes.routed`). With --stop the engine generates again, and the last rank stops in that; what
comes out then, if anything, is in RESULT.json.again.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tests.engines.vllm.cpu.changes import EXTENSION, Changes
from tests.engines.vllm.trained import known_prompts

NUM_TOKENS = 12
PROMPTS, FOLLOWING = map(list, zip(*known_prompts(6, NUM_TOKENS)))
NUM_TOP = 5
"""The likeliest tokens of a step, whose log probabilities are kept: those of the unlikely ones show the least error."""
MAX_BATCHED_TOKENS = 128


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="workers of this rank, processes of their own")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="stages, each of so many workers")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="that a prompt goes on with, at most")
    parser.add_argument("--dtype", default="float32", help="of the engine")
    parser.add_argument("--compiled", action="store_true", help="torch.compile, as by default, in place of eager")
    parser.add_argument("--stop", action="store_true", help="the last rank stops when all have generated once")
    parser.add_argument("--batched", action="store_true", help="experts take rows by expert")
    parser.add_argument("--ranks-per-node", type=int, default=0, help="of virtual nodes")
    parser.add_argument("--routed", action="store_true", help="write what the layers are given")
    parser.add_argument(
        "--chunk",
        type=int,
        default=MAX_BATCHED_TOKENS,
        help="the most tokens of a step; below the default prefixes are cached",
    )
    options = parser.parse_args(arguments)
    rank, size = int(os.environ.get("VLLM_DP_RANK", "0")), int(os.environ.get("VLLM_DP_SIZE", "1"))
    stop_file = options.result.with_name("stop")
    Changes(
        rank=size * options.tensor_parallel - 1,
        stop_file=str(stop_file) if options.stop else "",
        ranks_per_node=options.ranks_per_node,
        routed=str(options.result.parent) if options.routed else "",
        batched=options.batched,
    ).send()
    llm = make_engine(options)
    if options.pipeline_parallel > 1:
        # on CPU, vLLM's warm-up of an eager engine leaves out what later stages receive hidden states into
        llm.collective_rpc("execute_dummy_batch")

    def results() -> dict[str, Any]:
        return dict(zip(map(str, range(rank, len(PROMPTS), size)), generate(llm, PROMPTS[rank::size], rank, options)))

    if options.chunk < MAX_BATCHED_TOKENS:
        results()  # whose prefixes are cached for the next one
    options.result.write_text(json.dumps(results()))
    if options.stop:
        stop_file.touch()
        options.result.with_suffix(".json.again").write_text(json.dumps(results()))


def make_engine(options: argparse.Namespace) -> Any:
    from vllm import LLM
    from vllm.config import SchedulerConfig

    # on CPU vLLM raises the limit of some models to this, and warms up with that many tokens
    SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS = options.chunk
    backend = "ep_a2a_low_latency" if options.batched else "ep_a2a"
    parallel = {"enable_expert_parallel": True, "all2all_backend": backend} if options.expert_parallel else {}
    return LLM(
        str(options.model),
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
        distributed_executor_backend="uni" if options.tensor_parallel == options.pipeline_parallel == 1 else "mp",
        worker_extension_cls=EXTENSION,
        **parallel,
    )


def generate(llm: Any, prompts: list[list[int]], rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    # not as many steps on all ranks, so that some run steps without tokens at the end
    params = SamplingParams(
        temperature=0, max_tokens=options.tokens - 2 * (rank % 2), ignore_eos=True, logprobs=NUM_TOP, detokenize=False
    )
    completions = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [_as_numbers(each.outputs[0]) for each in completions]


def _as_numbers(completion: Any) -> dict[str, Any]:
    """Its tokens, and each step's likeliest tokens with their log probabilities."""
    logprobs = [{str(token): each.logprob for token, each in step.items()} for step in completion.logprobs]
    return {"tokens": list(completion.token_ids), "logprobs": logprobs}


if __name__ == "__main__":
    main()
