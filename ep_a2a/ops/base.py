"""Sizes of a step's results, and the agreement of all ranks on a config; for every op."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.config import Layout
from ep_a2a.errors import ConfigError, ConfigMismatchError, EpA2AError

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.rendezvous import Rendezvous


def num_rows(config: EpDispatchCombineConfig, step_tokens: int) -> int:
    """R, rows that dispatch returns for a step's max_num_tokens."""
    return min(config.world_size * step_tokens, config.max_num_recv_tokens)


class OpSizes:
    """Sizes of an op's steps, by MORI's names."""

    config: EpDispatchCombineConfig

    def decode_send_flat_idx(self, flat_idx: int) -> tuple[int, int]:
        """(source rank, token) of a value of get_dispatch_src_token_pos."""
        return divmod(int(flat_idx), self.max_num_tokens_to_send())

    def max_num_tokens_to_send_per_rank(self) -> int:
        """M, the most tokens that a rank dispatches."""
        return self.config.max_num_inp_token_per_rank

    def max_num_tokens_to_send(self) -> int:
        """W * M, the most tokens that all ranks dispatch."""
        return self.config.world_size * self.config.max_num_inp_token_per_rank

    def max_num_tokens_to_recv_per_rank(self) -> int:
        """Mean number of rows kept per source rank."""
        return self.config.max_num_recv_tokens_per_rank

    def max_num_tokens_to_recv(self) -> int:
        """R, rows that dispatch returns at max_num_tokens = M."""
        return self.config.max_num_recv_tokens


def leads(config: EpDispatchCombineConfig, step_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Leading sizes of what a step's dispatch returns: of the received ids, and of the rows for the experts.

    (R,) in layout compact, else (W, max_num_tokens); the rows of layout expert_major have (E, R).
    """
    most_rows = num_rows(config, step_tokens)
    lead = (most_rows,) if config.layout == Layout.COMPACT else (config.world_size, step_tokens)
    return lead, (config.num_local_experts, most_rows) if config.layout == Layout.EXPERT_MAJOR else lead


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
    error_text = None if error is None else f"{type(error).__name__}: {error}"
    everyone = rendezvous.exchange("op configuration", {"fields": fields, "error": error_text})
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
