"""Real vLLM engines on GPUs, by all-to-all backend."""
