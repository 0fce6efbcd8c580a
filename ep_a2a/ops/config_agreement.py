"""agree_on_config: the ranks of a group compare the configs of an op that they build together."""

from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.errors import ConfigError, ConfigMismatchError
from ep_a2a.memory.rendezvous import Rendezvous


def agree_on_config(config: EpDispatchCombineConfig, rendezvous: Rendezvous, index: int = 0) -> None:
    """Compare the configs of all ranks, and return when they fit together. Collective.

    Args:
        config: this rank's.
        rendezvous: where the ranks meet. `Rendezvous.telling` holds the call.
        index: the op's index, equal on all ranks. Ops of equal index share memory, so their steps must not overlap.

    Raises:
        ConfigError: rank or world size is not the group's.
        ConfigMismatchError: a field that must be equal on all ranks is not, or another rank has an error; the error
            names the field, or that error, and the ranks.
        EnvironmentVariableError: a variable that counts cannot be read on this rank.
        RankTimeoutError: ranks did not come.
    """
    own = (config.rank, config.world_size)
    if own != (rendezvous.rank, rendezvous.world_size):
        raise ConfigError(
            f"rank {rendezvous.rank} of {rendezvous.world_size}, as in the group", f"rank {own[0]} of {own[1]}"
        )
    fields = config.shared_fields() | {"index": str(index)}
    # in a dict, since ranks may have different fields
    everyone = rendezvous.exchange("op configuration", {"fields": fields})
    _raise_differences([each["fields"] for each in everyone])


def _raise_differences(everyone: list[dict[str, str]]) -> None:
    for name in dict.fromkeys(name for each in everyone for name in each):
        values = [fields.get(name, "absent") for fields in everyone]
        if len(set(values)) > 1:
            by_value = {v: [r for r, other in enumerate(values) if other == v] for v in dict.fromkeys(values)}
            got = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
            raise ConfigMismatchError("to be the same on all ranks", got, field=name)
