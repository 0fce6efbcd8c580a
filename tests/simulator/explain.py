"""What a failure prints of a run: the last operations of each rank."""

from collections.abc import Iterator

from tests.simulator.ranks import Simulation
from tests.simulator.trace import Operation, Trace

SHOWN = 8
"""Operations of each rank. A wait repeats its own, of which the last one is shown."""


def describe(simulation: Simulation) -> str:
    """The last operations of each rank, a line each."""
    trace = simulation.pool.trace
    return "\n".join(line for rank in sorted(trace.last) for line in _lines_of(trace, rank))


def _lines_of(trace: Trace, rank: int) -> Iterator[str]:
    yield f"rank {rank}, its last operations:"
    shown: dict[tuple[str, str, str, int], Operation] = {}
    for each in reversed(trace.last[rank]):
        if each.places.size and len(shown) < SHOWN:
            shown.setdefault((each.task, each.name, each.site, int(each.places[0])), each)
    for each in reversed(shown.values()):
        first = "?" if each.values is None else int.from_bytes(each.values[0].tobytes(), "little", signed=True)
        where = f"{trace.name_of(int(each.places[0]))} ({each.places.size} elements of {each.size} bytes)"
        yield f"  {each.number}: {each.task}: {each.name} {where}, first {first}, at {each.site}"
