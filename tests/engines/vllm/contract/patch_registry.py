"""The registry of patches: every place where ep_a2a.integrations.vllm changes vLLM, why, and until when.

tests/integration/test_vllm_contract.py fails when a target moves. docs/vllm.md shows this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One change of vLLM.

    Attributes:
        name: its name in the docstring of the function that applies it.
        target: the attribute that is replaced, "module:attribute".
        applied: in which processes, and when.
        what: the change.
        why: what happens without it.
        remove_when: the upstream change that makes it unnecessary.
    """

    name: str
    target: str
    applied: str
    what: str
    why: str
    remove_when: str


REGISTRY = "vLLM has a registry of prepare/finalize factories (PR #50556, open; in no release up to 0.33)"
CHOSEN = "in processes of users who chose the backend"
MODEL = "in processes that run a model with the backend active"
ENGINE = "in processes of users who chose the backend, an engine's own and those of its clients"
CAUSE = "vLLM tells clients why an engine has ended"

PATCHES = (
    Patch(
        "backend-name",
        "vllm.config.parallel:All2AllBackend",
        "at plugin load, for everybody",
        "the name ep_a2a is added to the names that ParallelConfig.all2all_backend takes; where that cannot be done, "
        "ParallelConfig says why to those who give it the name",
        "the command line and the configuration reject the name",
        REGISTRY,
    ),
    Patch(
        "chosen-config",
        "vllm.config.parallel:ParallelConfig.__post_init__",
        "at plugin load, for everybody",
        "a configuration that names ep_a2a becomes a subclass, which activates the other patches wherever it is "
        "sent and answers use_sequence_parallel_moe; others are left as they are",
        "there is no hook between parsing the options and making the groups; the backends for which "
        "tensor-parallel ranks take distinct tokens are a list in vLLM's source",
        REGISTRY,
    ),
    Patch(
        "config-check",
        "vllm.platforms:current_platform.check_and_update_config",
        CHOSEN,
        "options that the backend cannot work with are refused before any process is started",
        "LoRA would fail with an assertion at model load; other combinations later",
        "vLLM asks a backend whether it supports a configuration",
    ),
    Patch(
        "communicator-class",
        "vllm.platforms:current_platform.get_device_communicator_cls",
        CHOSEN,
        "communicators come from our factory, which gives that of the expert-parallel group a lazy all2all_manager",
        "the platform's class raises 'Unknown all2all backend' (GPU) or falls back to another one (CPU)",
        "vLLM makes all-to-all managers through a registry",
    ),
    Patch(
        "prepare-finalize",
        "vllm.model_executor.layers.fused_moe.all2all_utils:maybe_make_prepare_finalize",
        MODEL,
        "MoE layers whose tokens travel get our prepare/finalize; the function is replaced in every module that "
        "holds it",
        "it returns None for names that it does not know",
        REGISTRY,
    ),
    Patch(
        "worker-steps",
        "vllm.v1.worker.gpu_worker:Worker.execute_model",
        MODEL,
        "execute_model, sample_tokens and execute_dummy_batch raise what our kernels recorded, and hand out no "
        "tokens then",
        "a step that timed out would return wrong tokens: a replayed graph runs no Python of ours",
        "vLLM asks all managers for faults after every step (query_fault: some runners from 0.25, not all paths)",
    ),
    Patch(
        "worker-warm-up",
        "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
        MODEL,
        "after it, waits are bounded by EP_A2A_TIMEOUT_SECS instead of the process group's timeout",
        "ranks are minutes apart while they compile and capture, and must not be later",
        "vLLM tells managers when warm-up has ended",
    ),
    Patch(
        "worker-counters",
        "vllm.v1.worker.gpu_worker:Worker",
        MODEL,
        "a method ep_a2a_counters is added, which collective_rpc calls by its name",
        "counters would not leave the worker: collective_rpc takes functions only where vLLM is told to unpickle them, "
        "and a deployment has one worker_extension_cls, which may be another's",
        "vLLM collects numbers from all-to-all managers",
    ),
    Patch(
        "output-thread",
        "vllm.v1.executor.multiproc_executor:WorkerProc.enqueue_output",
        MODEL,
        "an error in get_output is sent as the step's result",
        "up to vLLM 0.24 it ends the sending thread silently, and the engine waits for its own timeout",
        "0.24 is no longer supported",
    ),
    Patch(
        "engine-cause",
        "vllm.v1.engine.core:EngineCoreProc._send_engine_dead",
        ENGINE,
        "the message that ends an engine carries the text of the error if it is ours",
        "the error stands in the engine's log only",
        CAUSE,
    ),
    Patch(
        "client-cause",
        "vllm.v1.engine.core_client:BackgroundResources.validate_alive",
        ENGINE,
        "a client takes the longer message for what it is, and remembers the text",
        "it would take the message for an output that it cannot decode",
        CAUSE,
    ),
    Patch(
        "dead-error",
        "vllm.v1.engine.exceptions:EngineDeadError.__init__",
        ENGINE,
        "an EngineDeadError has the remembered text behind vLLM's own, also in the message for HTTP clients",
        "clients make these errors anew in several places, with a fixed text",
        CAUSE,
    ),
    Patch(
        "cpu-runner",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._select_forward",
        f"{MODEL}, on CPU",
        "MoE layers are called as the registered operators that they are on GPUs",
        "torch.compile would trace into the exchange between processes",
        "vLLM calls them as operators on CPU, too",
    ),
)
