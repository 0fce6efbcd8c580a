"""vLLM's plugin: `--all2all-backend ep_a2a` on an unpatched vLLM.

vLLM calls `register` through the entry point group `vllm.general_plugins` in each of its processes. `register` adds the
backend's name. All other patches are applied only in processes whose configuration names the backend.
tests/engines/vllm/contract/patches.toml lists the patches.

From the flag to `op.dispatch`:

1. `plugin.py`: `register` adds the name and passes a ParallelConfig that has it to `choose`.
2. `parallel_config.py`: `choose` makes an EpA2AParallelConfig, whose class applies the patches to the platform here and
   wherever the configuration is unpickled. `check_options` refuses what cannot work.
3. `communicator.py`: vLLM makes its groups by `make_communicator`, which gives the expert-parallel group our manager.
4. `prepare_finalize.py`: each MoE layer gets an EpA2APrepareAndFinalize, which asks for its dispatcher.
5. `../token_format.py`: the format in which tokens travel, and the handle kwargs of its op.
6. `../manager.py`: builds the op, which layers of one shape share.
7. `../dispatcher.py`: calls `op.dispatch` with the layer's number as its tag.
"""

from ep_a2a.integrations.vllm.plugin import register

__all__ = ["register"]
