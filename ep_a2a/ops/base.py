"""What all ops of this package share, whatever moves their tokens: sizes, order of streams, agreement of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from ep_a2a.config import Layout
from ep_a2a.errors import ConfigError, ConfigMismatchError, EpA2AError, UnsupportedError
from ep_a2a.memory.streams import StreamOrder

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.rendezvous import Rendezvous

DispatchResult = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]


def num_rows(config: EpDispatchCombineConfig, max_num_tokens: int) -> int:
    """R, rows that dispatch returns for a step's max_num_tokens."""
    return min(config.world_size * max_num_tokens, config.max_num_recv_tokens)


def leads(config: EpDispatchCombineConfig, max_num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Leading sizes of what a step's dispatch returns: of the received ids, and of the rows for the experts.

    (R,) in layout compact, else (W, max_num_tokens); the rows of layout expert_major have (E, R).
    """
    most_rows = num_rows(config, max_num_tokens)
    lead = (most_rows,) if config.layout == Layout.COMPACT else (config.world_size, max_num_tokens)
    return lead, (config.num_local_experts, most_rows) if config.layout == Layout.EXPERT_MAJOR else lead


class DispatchCombineBase:
    """Base of the ops: a config, a device, and what follows from them. Usable as a context manager that closes it.

    Args:
        config: shapes and choices.
        device: where the op's tensors live.
    """

    def __init__(self, config: EpDispatchCombineConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._streams = StreamOrder()

    def num_rows(self, max_num_tokens: int) -> int:
        """R, rows that dispatch returns for a step's max_num_tokens."""
        return num_rows(self.config, max_num_tokens)

    def decode_send_flat_idx(self, flat: int) -> tuple[int, int]:
        """(source rank, token) of a value of get_dispatch_src_token_pos."""
        return divmod(flat, self.max_num_tokens_to_send())

    def max_num_tokens_to_send_per_rank(self) -> int:
        """M."""
        return self.config.max_num_inp_token_per_rank

    def max_num_tokens_to_send(self) -> int:
        """W * M."""
        return self.config.world_size * self.config.max_num_inp_token_per_rank

    def max_num_tokens_to_recv_per_rank(self) -> int:
        """Rows kept per source, on average."""
        return self.config.max_num_recv_tokens_per_rank

    def max_num_tokens_to_recv(self) -> int:
        """R at max_num_tokens = M."""
        return self.config.max_num_recv_tokens

    @property
    def num_own_bytes(self) -> int:
        """Bytes of the op's buffers on its device that are not an arena's."""
        return 0

    def set_max_sms(self, max_sms: int) -> None:
        """Bounds the multiprocessors of launches from now on; 0 = all. Without effect where a library launches."""

    def compile_halves(self) -> None:
        """Makes the split calls ready to be captured at once. Without effect where nothing is left to compile."""

    def record_spans(self) -> None:
        """Takes kernels that note times from now on; UnsupportedError where there are none."""
        raise UnsupportedError(
            "an op whose kernels can note times", f"{type(self).__name__}, which has none", "Trace an op of one node."
        )

    def close(self) -> None:
        """Ends the use of the op; local and idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_buffer_request(self, dtype: torch.dtype, hidden_dim: int) -> None:
        if dtype != self.config.combined_dtype or hidden_dim not in (-1, self.config.hidden_dim):
            raise ConfigError(
                f"{self.config.combined_dtype} and hidden size {self.config.hidden_dim}", f"{dtype} and {hidden_dim}"
            )


def agree_on_config(
    config: EpDispatchCombineConfig | None, rendezvous: Rendezvous, index: int = 0, error: EpA2AError | None = None
) -> None:
    """Returns when all ranks of the group have come with configs that fit together. Collective.

    A rank that cannot come with a config comes with its error, so that the others do not wait for it.

    Args:
        config: this rank's; None with an error.
        rendezvous: where the ranks meet.
        index: the op's index, equal on all ranks.
        error: why this rank cannot go on.

    Raises:
        EpA2AError: this rank's own `error`.
        ConfigError: rank or world size is not the group's.
        ConfigMismatchError: a field that must be equal on all ranks is not; the error names it and the ranks.
        RankTimeoutError: ranks did not come.
    """
    fields: dict[str, str] = {}
    try:
        # what the environment says counts, too, and may not be readable on this rank
        fields = {} if config is None else config.shared_fields() | {"index": str(index)}
    except EpA2AError as unreadable:
        error = error or unreadable
    if config is not None and error is None:
        error = _own_error(config, rendezvous)
    told = None if error is None else f"{type(error).__name__}: {error}"
    everyone = rendezvous.exchange("op configuration", {"fields": fields, "error": told})
    if error is not None:
        raise error
    _raise_differences([each["fields"] for each in everyone if each["error"] is None])
    failed = {rank: each["error"] for rank, each in enumerate(everyone) if each["error"] is not None}
    if failed:
        rank, text = next(iter(failed.items()))
        raise ConfigMismatchError("every rank to build the op", f"rank {rank} could not: {text}", "Mend it there.")


def _own_error(config: EpDispatchCombineConfig, rendezvous: Rendezvous) -> EpA2AError | None:
    if (config.rank, config.world_size) != (rendezvous.rank, rendezvous.world_size):
        return ConfigError(
            f"rank {rendezvous.rank} of {rendezvous.world_size}, as in the group",
            f"rank {config.rank} of {config.world_size}",
        )
    return None


def _raise_differences(everyone: list[dict[str, str]]) -> None:
    for name in dict.fromkeys(name for each in everyone for name in each):
        values = [fields.get(name, "absent") for fields in everyone]
        if len(set(values)) > 1:
            by_value = {v: [r for r, other in enumerate(values) if other == v] for v in dict.fromkeys(values)}
            got = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
            raise ConfigMismatchError(f"the same {name} on all ranks", got)
