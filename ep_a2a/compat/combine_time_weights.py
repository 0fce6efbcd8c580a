"""An op that in layout expert_major may take router weights in combine instead of dispatch."""

import math
from typing import Any

import torch

from ep_a2a.config import EpDispatchCombineConfig, Layout
from ep_a2a.errors import ShapeError, UnsupportedError
from ep_a2a.kernels.combine_time_weights_kernels import exchange_weights_kernel
from ep_a2a.kernels.compilation import compile_all
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.layout import padded
from ep_a2a.kernels.ring_shape import Rings
from ep_a2a.memory.arena import BlockSizes
from ep_a2a.memory.guards import outside_modes
from ep_a2a.ops.arguments import CombineArguments, Step
from ep_a2a.ops.inputs import check_tensor
from ep_a2a.ops.op import EpDispatchCombineOp
from ep_a2a.ops.row_constants import shape_of
from ep_a2a.ops.staged import StagedEngine

FLAGGED_WORD_BYTES = ADDRESS_BYTES = 8
WEIGHT_BYTES = 4
EXCHANGE_WARPS = 4
EXCHANGED_WORDS = 1024
"""Weights that a program moves at once."""


LATE_WEIGHTS = 1
"""Tag of a dispatch whose weights may follow in combine, by which ranks find out that they disagree."""


class CombineTimeWeightsOp(EpDispatchCombineOp):
    """EpDispatchCombineOp that in layout expert_major takes the router's weights in dispatch, in combine or nowhere.

    All ranks pass a step's weights to the same call; a weight that no call is given is 1. Weights that are passed to
    combine cost one hop more: the experts' ranks need them before rows travel back, so combine_send waits for the
    weights of all ranks. In other layouts the op is as its base.
    """

    @outside_modes()
    def __init__(self, config: EpDispatchCombineConfig, **where: Any) -> None:
        super().__init__(config, **where)
        self._exchange: WeightExchange | None = None
        if config.layout == Layout.EXPERT_MAJOR:
            # made before the exchange, which synchronises the device: valid on all streams, and in no captured graph
            shape = (config.max_num_inp_token_per_rank, config.topk)
            self._ones = torch.ones(shape, dtype=torch.float32, device=self.device)
            self._exchange = WeightExchange(self)

    def _prepare_dispatch(self, step: Step) -> None:
        if self._exchange is not None and step.weights is None:
            tokens: object = step.tokens
            num_tokens = tokens.shape[0] if isinstance(tokens, torch.Tensor) and tokens.dim() else 0
            step.weights, step.tag = self._ones[:num_tokens], LATE_WEIGHTS
        super()._prepare_dispatch(step)

    def _prepare_combine(self, step: Step, args: CombineArguments) -> None:
        """Checks a combine, and launches the exchange of weights that its other launches need."""
        if self._exchange is None or args.weights is None or step.tag != LATE_WEIGHTS:
            super()._prepare_combine(step, args)
            return
        weights, args.weights = args.weights, None
        super()._prepare_combine(step, args)
        self._exchange.run(weights, step.num_tokens, step.bounds.most)

    def record_spans(self) -> None:
        """Launch kernels that note times from now on. Local."""
        super().record_spans()
        if self._exchange is not None:
            self._exchange.record_spans()

    def reset(self) -> None:
        """Makes the op usable again after an error or an unfinished step. Collective; the step in progress is lost."""
        if self._exchange is not None:
            # epochs begin anew, so no word of the earlier ones may be left
            self.arena.together("clearing the inbox of weights", self._exchange.clear)
        super().reset()


class WeightExchange:
    """Sends weights to all ranks' inboxes and places those that have come. Construction is collective.

    Where the host moves blocks between nodes, it exchanges the weights among the ranks of equal local number first.

    Args:
        op: of layout expert_major, whose rows the weights belong to; the inbox lives in its arena.
    """

    def __init__(self, op: EpDispatchCombineOp) -> None:
        config = op.config
        self._config, self._device, self._table = config, op.device, op.memory.table
        self._streams = op.streams
        world_size, topk = config.world_size, config.topk
        self._between = op.engine if isinstance(op.engine, StagedEngine) else None
        rings = self._rings = Rings.of(config)
        num_weights = config.max_num_inp_token_per_rank * topk
        num_exchanged = rings.num_nodes * num_weights if rings.by_host else 0
        inbox_bytes, exchanged_bytes = world_size * num_weights * FLAGGED_WORD_BYTES, 2 * num_exchanged * WEIGHT_BYTES
        address_bytes = world_size * ADDRESS_BYTES
        sizes = BlockSizes(inbox_bytes, {}, address_bytes + exchanged_bytes, {}, record_words=1)
        memory = op.arena.acquire(f"{config.digest()} combine-time weights", op.index, sizes)
        self._inbox = memory.symmetric["own"].local
        self._addresses = memory.local_own[:address_bytes].view(torch.int64)
        # of this rank for all nodes, and of the ranks of its local number
        self._exchanged = memory.local_own[address_bytes:].view(torch.float32).view(2, num_exchanged)
        self._addresses.copy_(torch.tensor(memory.symmetric["own"].peer_addresses, dtype=torch.int64, device="cpu"))
        self._kernel = exchange_kernel(config, spans=False)
        op.arena.together("initialising the exchange of weights", self._initialize)

    def _initialize(self) -> None:
        self.clear()
        self._compile()

    def _compile(self) -> None:
        if self._device.type == "cuda":
            compile_all([self._kernel], self._config)

    def record_spans(self) -> None:
        """Launch a kernel that notes when its programs begin and end, from now on."""
        self._kernel = exchange_kernel(self._config, spans=True)
        self._compile()

    def clear(self) -> None:
        """Forgets what has come; no rank may be sending."""
        self._inbox.zero_()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def run(self, weights: torch.Tensor, num_tokens: int, step_tokens: int) -> None:
        """Launches the exchange, between a step's dispatch and its combine, once at most; on all ranks or on none.

        Args:
            weights: [num_tokens, K] float32, of this rank's tokens.
            num_tokens, step_tokens: the step's.

        Raises:
            DtypeError, DeviceError, ContiguityError, ShapeError: what their names say, before anything is launched.
            UnsupportedError: puts of kernels carry the tokens between nodes; nothing was launched.
            RankTimeoutError: on CPU, ranks of other nodes did not come to an exchange of the hosts.
        """
        if self._rings.by_puts:
            raise UnsupportedError(
                "the router's weights in dispatch, where puts carry tokens between nodes",
                f"weights in combine, with internode_transport {self._config.internode_transport!r}",
                "Pass topk_weights to the dispatch, and None to the combine, on every rank.",
            )
        check_tensor("weights", weights, (torch.float32,), self._device)
        if tuple(weights.shape) != (num_tokens, self._config.topk):
            raise ShapeError(
                f"weights of this rank's own tokens, {(num_tokens, self._config.topk)}", str(tuple(weights.shape))
            )
        self._streams.follow(self._device)
        if self._between is not None:
            weights = self._from_all_nodes(self._between, weights, step_tokens)
        sizes = (num_tokens, step_tokens, self._config.max_num_inp_token_per_rank, self._config.rank)
        values = (weights, self._addresses, self._table, *sizes)
        self._kernel.run(self._config.world_size, values, self._device)

    def _from_all_nodes(self, engine: StagedEngine, weights: torch.Tensor, step_tokens: int) -> torch.Tensor:
        """Returns the weights [nodes, step_tokens, K] of the ranks of this local number."""
        shape = (self._rings.num_nodes, step_tokens, self._config.topk)
        sent, received = (words[: math.prod(shape)].view(shape) for words in self._exchanged.unbind())
        sent[:, : weights.shape[0]] = weights
        engine.exchange_in_combine(received, sent)
        return received


def exchange_kernel(config: EpDispatchCombineConfig, *, spans: bool) -> CompiledKernel:
    """The kernel that exchanges an op's weights. With spans its programs note when they begin and end."""
    lanes = padded(config.topk)
    constants = {
        "S": shape_of(config),
        "GPUS": Rings.of(config).gpus_per_node if config.is_staged else config.world_size,
        "BLOCK_WORDS": EXCHANGED_WORDS,
        "BLOCK_ROWS": EXCHANGED_WORDS // lanes,
        "SPANS": spans,
    }
    operands = torch.int32, torch.int64, torch.int64
    return CompiledKernel(exchange_weights_kernel, operands, constants, EXCHANGE_WARPS)
