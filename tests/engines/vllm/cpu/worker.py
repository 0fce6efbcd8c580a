"""Where the changes that a test has sent are made: vLLM imports this module in each worker for `WorkerExtension`."""

from tests.engines.vllm.cpu.changes import Changes


class WorkerExtension:
    """Adds nothing to the worker."""


Changes.sent().make()
