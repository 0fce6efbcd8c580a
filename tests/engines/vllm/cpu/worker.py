"""Where the changes that a test has sent are made: vLLM imports this module in each worker for `WorkerExtension`."""

from tests.engines.vllm.cpu.changes import Changes, split_steps


class WorkerExtension:
    """Adds to the worker what a test asks of it by collective_rpc."""

    def num_split_steps(self) -> int:
        """See `Changes.counts_splits`."""
        return len(split_steps)


Changes.sent().make()
