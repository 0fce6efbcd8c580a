"""Our dispatcher for SGLang's MoE layers: dispatch before the experts, combine after them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.distributed.parallel_state import get_attn_tp_group, get_tp_group
from sglang.srt.environ import envs
from sglang.srt.layers.deep_gemm_wrapper import DEEPGEMM_SCALE_UE8M0
from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPConfig, DeepEPLLDispatchOutput
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopKOutputChecker
from sglang.srt.layers.moe.utils import is_tbo_enabled
from torch import Tensor

from ep_a2a.compat.deep_ep.utils import CommStream
from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.dispatcher import Dispatcher
from ep_a2a.integrations.manager import EngineManager
from ep_a2a.integrations.token_format import RAW, LayerShape, TokenFormat, agreed_bounds, rounded_up, tokens_per_rank

TOKENS_OPTION = "--chunked-prefill-size"
ROWS_MULTIPLE = 128
"""DeepGEMM's masked products write tiles of so many rows, which must not reach into the next expert's."""
LEAST_MAX_TOKENS = 4096
"""SGLang's bound of a rank's decode requests and of its dummy runs, which it settles after the layers are built."""


@functools.cache
def manager_of(group: Any) -> EngineManager:
    """Returns the manager of an SGLang GroupCoordinator; the first call makes it."""
    # SGLang keeps its products off so many multiprocessors
    halves = (2, DeepEPConfig.get_instance().num_sms) if is_tbo_enabled() else (1, 0)
    manager = EngineManager(group.cpu_group, *halves)
    manager.tokens_option = TOKENS_OPTION
    manager.device, manager.device_group = torch.device(group.device), group.device_group
    # its first rank streams the tokens of all
    manager.tp_group = get_attn_tp_group()
    return manager


class HalfShape(LayerShape):
    """The sizes of a layer whose steps SGLang may split anywhere: each half may have nearly all tokens."""

    def of_micro_batch(self, num_micro_batches: int) -> LayerShape:
        """Returns the shape of whole steps."""
        return self


stream_beside = functools.cache(CommStream)
"""Returns a device's stream for exchanges that run beside products."""


class EpA2ADispatcher(BaseDispatcher):  # type: ignore[misc]
    """SGLang's dispatcher on an op that all layers of one shape share. Rows travel in the activations' dtype.

    Experts see as many rows as all ranks' tokens in SGLang's standard format; without DP attention, W * t rows, t being
    the tokens of a rank. Ids are local; slots of other ranks' experts, and all slots of rows without a token, are -1.

    The op is built with the layer: before SGLang sizes the KV cache. Collective.

    Args:
        config: SGLang's MoeRunnerConfig of the layer.

    Raises:
        UnsupportedError: shared experts are fused into the layer.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.num_fused_shared_experts:
            raise UnsupportedError(
                "shared experts apart from the routed ones",
                f"{config.num_fused_shared_experts} fused",
                "Add --disable-shared-experts-fusion.",
            )
        # settled options from 0.5.20, where ServerArgs are those of the user
        settled = getattr(runtime_context, "get_schedule", runtime_context.get_server_args)()
        self._attn_tp_size = runtime_context.get_parallel().attn_tp_size
        most = max(settled.chunked_prefill_size or 0, LEAST_MAX_TOKENS)
        manager = manager_of(get_tp_group())
        self._shape = HalfShape(
            dtype=config.params_dtype,
            hidden_dim=config.hidden_size,
            topk=config.top_k,
            num_experts=config.num_experts,
            num_local_experts=config.num_local_experts,
            max_tokens=tokens_per_rank(most, self._attn_tp_size),
            local_ids=True,
        )
        self._config, self._manager = config, manager
        self._exchanges = manager.dispatchers(config, RAW, self._shape)
        self._batched: list[Dispatcher] = []
        self._most_batched = 0
        self._used = list(self._exchanges)
        self._begun: dict[int | None, tuple[Any, ...]] = {}

    def batch_small_steps(self, *, casts: bool) -> None:
        """Gives steps of at most SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK tokens rows by expert. Collective.

        Args:
            casts: rows travel as fp8 with a scale for 128 elements.
        """
        self._multiple = ROWS_MULTIPLE // math.gcd(ROWS_MULTIPLE, self._manager.world_size)
        most = rounded_up(envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get(), self._multiple)
        scale_format = "ue8m0" if DEEPGEMM_SCALE_UE8M0 else "float32"
        token_format = TokenFormat("fp8_per_1x128", scale_format, column_major=True) if casts else RAW
        shape = replace(self._shape, max_tokens=most, layout="expert_major")
        self._batched, self._most_batched = self._manager.dispatchers(self._config, token_format, shape), most

    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> Any:
        """Sends hidden_states [T, H] with their weights and ids [T, K].

        Args:
            topk_output: in the standard or the bypassed format; ids are global, -1 drops a slot.

        Returns:
            SGLang's StandardDispatchOutput; for a small step, see `batch_small_steps`, its DeepEPLLDispatchOutput.

        Raises:
            UnsupportedError: another format.
            TooManyTokensError: a rank brings more tokens than its buffers hold; raised on all ranks.
        """
        return self._dispatched(0, 0, hidden_states, topk_output)

    def combine(self, combine_input: Any) -> Tensor:
        """Returns the sums [T, H] of this rank's tokens.

        Args:
            combine_input: SGLang's StandardCombineInput, whose hidden_states hold a weighted sum for each received row,
                or its DeepEPLLCombineInput, whose hidden_states hold the experts' rows.
        """
        return self._combined(0, combine_input)

    def dispatch_a(self, hidden_states: Tensor, topk_output: Any, tbo_subbatch_index: int | None) -> None:
        """Begins `dispatch` of a half of a step (two-batch overlap), beside what the current stream gets next."""
        half = tbo_subbatch_index
        self._begin(half, self._dispatched, half or 0, self._manager.split_max_sms, hidden_states, topk_output)

    def combine_a(self, combine_input: Any, tbo_subbatch_index: int | None) -> None:
        """Begins `combine` of a half of a step, beside what the current stream gets next."""
        self._begin(tbo_subbatch_index, self._combined, tbo_subbatch_index or 0, combine_input)

    def dispatch_b(self, tbo_subbatch_index: int | None) -> Any:
        """Makes the current stream wait for what was begun for this half, and returns its result."""
        result, event, _ = self._begun.pop(tbo_subbatch_index)
        event.current_stream_wait()
        return result

    combine_b = dispatch_b

    def _begin(self, half: int | None, call: Callable[..., Any], *arguments: Any) -> None:
        result, event = stream_beside(self._manager.device).run(lambda: call(*arguments), (), None, async_finish=True)
        # the current stream must not use the arguments' memory again before it waits
        self._begun[half] = result, event, arguments

    def _dispatched(self, place: int, max_sms: int, hidden_states: Tensor, topk_output: Any) -> Any:
        if TopKOutputChecker.format_is_bypassed(topk_output):
            topk_output = topk_output.to_standard()
        if not TopKOutputChecker.format_is_standard(topk_output):
            raise UnsupportedError(
                "ids and weights from the router", type(topk_output).__name__, "Choose --moe-runner-backend triton."
            )
        bounds = self._bounds(len(hidden_states))
        most = bounds if isinstance(bounds, int) else max(bounds)
        is_batched = most <= self._most_batched
        exchange = self._used[place] = (self._batched if is_batched else self._exchanges)[place]
        if self._manager.split_max_sms:
            exchange.op.set_max_sms(max_sms)
        fitted = exchange.fitted(hidden_states, topk_output.topk_weights, topk_output.topk_ids)
        if is_batched:
            return self._by_expert(exchange, fitted, topk_output, most)
        received = exchange.dispatch(*fitted, step_tokens=bounds)
        weights = StandardTopKOutput(received.weights, received.indices, topk_output.router_logits)
        # a view of its own: DeepGEMM's runner empties what it has read (`Tensor.set_`)
        return StandardDispatchOutput(received.tokens.view_as(received.tokens), None, weights)

    def _by_expert(self, exchange: Dispatcher, fitted: Any, topk_output: Any, most: int) -> Any:
        received = exchange.dispatch(*fitted, step_tokens=rounded_up(most, self._multiple))
        counts, config = exchange.op.expert_recv_count, exchange.op.config
        rows, scales = (
            each if each is None else each.view(len(counts), -1, each.shape[-1])
            for each in (received.tokens, received.scales)
        )
        mean = -(-most * config.world_size * config.topk // config.total_experts)
        return DeepEPLLDispatchOutput(rows, scales, topk_output.topk_ids, topk_output.topk_weights, counts, mean)

    def _bounds(self, num_tokens: int) -> int | tuple[int, ...]:
        """Returns the most tokens of every rank in this step, or of each: from the counts that ranks have exchanged.

        Ranks of DP attention exchange them, padded to one number where a graph may run. Without DP attention SGLang
        gives all ranks equal shares; kernels report ranks that differ.
        """
        counts, sharing = get_dp_global_num_tokens(), self._attn_tp_size
        if counts is None or len(counts) == 1:
            counts, sharing = [num_tokens], 1
        return agreed_bounds(counts, sharing, self._shape.max_tokens, TOKENS_OPTION)

    def _combined(self, place: int, combine_input: Any) -> Tensor:
        exchange, rows = self._used[place], combine_input.hidden_states
        return exchange.combine(rows, rows.new_empty(exchange.num_tokens, rows.shape[-1]))
