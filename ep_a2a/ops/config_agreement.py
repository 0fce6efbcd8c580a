"""agree_on_config: the ranks of a group compare the configs of an op that they build together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.errors import ConfigError, ConfigMismatchError, EpA2AError

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.rendezvous import Rendezvous


def agree_on_config(
    config: EpDispatchCombineConfig | None, rendezvous: Rendezvous, index: int = 0, error: EpA2AError | None = None
) -> None:
    """Compare the configs of all ranks, and return when they fit together. Collective.

    A rank that cannot build the op passes its error, so that the others raise at once instead of waiting for it.

    Args:
        config: this rank's; may be None with an error.
        rendezvous: where the ranks meet.
        index: the op's index, equal on all ranks. Ops of equal index share memory, so their steps must not overlap.
        error: the reason why this rank cannot build the op.

    Raises:
        EpA2AError: this rank's own `error`.
        ConfigError: rank or world size is not the group's.
        ConfigMismatchError: a field that must be equal on all ranks is not, or another rank has an error; the error
            names the field, or that error, and the ranks.
        RankTimeoutError: ranks did not come.
    """
    fields: dict[str, str] = {}
    try:
        # variables of the environment count, too, and one may not be readable on this rank
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
