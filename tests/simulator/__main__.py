"""Repeats a run of the simulator, runs many seeds, or searches what notices that a site has lost its order."""

import contextlib
import itertools
import time
from dataclasses import replace
from typing import Annotated

import typer

from tests.simulator.cases import BODIES, CASES, bodies_of
from tests.simulator.ranks import Conditions
from tests.simulator.runs import CONDITIONS, SimulationFailed, run
from tests.simulator.scheduler import Fault
from tests.simulator.sites import ordering_sites


def main(
    case: Annotated[str, typer.Argument(help=f"One of {', '.join(CASES)}; or sites, to search what notices each.")],
    body: Annotated[str, typer.Argument(help=f"One of {', '.join(BODIES)}; of sites, a part of their keys.")] = "",
    seed: Annotated[int, typer.Option(help="Of all choices.")] = 0,
    runs: Annotated[int, typer.Option(help="Seeds to run, from --seed on.")] = 1,
    switches: Annotated[float, typer.Option(help="Probability that a task is interrupted before an access.")] = 0.0,
    staleness: Annotated[float, typer.Option(help="Probability that a load goes one value further back.")] = 1.0,
    fresh_looks: Annotated[
        bool, typer.Option("--fresh-looks", help="The first volatile load behind a pause sees all that has landed.")
    ] = False,
    landing: Annotated[str, typer.Option(help="Which pending store lands first: newest, oldest or random.")] = "newest",
    halves: Annotated[bool, typer.Option("--halves", help="Stores land by halves.")] = False,
    num_sms: Annotated[int, typer.Option(help="Multiprocessors of a GPU.")] = 2,
    weaken: Annotated[list[str] | None, typer.Option(help="Key of a site that loses its order.")] = None,
    fault: Annotated[
        list[str] | None, typer.Option(help="RANK:OPERATION at which a rank dies, or stops :SECS.")
    ] = None,
) -> None:
    """Print how the runs end; 1 if one fails."""
    if case == "sites":
        search(body)
        return
    places = frozenset(site.place for site in ordering_sites() if site.key in (weaken or ()))
    faults = tuple(read_fault(text) for text in fault or ())
    given = Conditions(seed, switches, staleness, fresh_looks, landing, num_sms, places, faults=faults, halves=halves)
    for number in range(seed, seed + runs):
        try:
            found = run(case, body, replace(given, seed=number))
        except SimulationFailed as failed:
            typer.echo(failed)
            raise typer.Exit(1) from failed
        typer.echo(f"seed {number}: {sum(found.machine.scheduler.num_operations.values())} operations, right")


def read_fault(text: str) -> Fault:
    """The fault of RANK:OPERATION or RANK:OPERATION:SECS."""
    rank, operation, *secs = text.split(":")
    return Fault(int(rank), int(operation), float(secs[0]) if secs else None)


def search(part: str) -> None:
    """Print for each site whose key has `part` the run that notices its weakening."""
    seen = {}
    for case in CASES:
        for body, name in itertools.product(bodies_of(case), CONDITIONS):
            # ranks that stop fail steps of bodies that expect none to
            with contextlib.suppress(SimulationFailed):
                seen[case, body, name] = run(case, body, CONDITIONS[name]).machine.sites_seen
    for site in ordering_sites():
        if part not in site.key:
            continue
        verdict = "no run comes here"
        for (case, body, name), places in seen.items():
            if site.place in places:
                start = time.process_time()
                verdict = "no run notices"
                try:
                    run(case, body, replace(CONDITIONS[name], weakened=frozenset([site.place])))
                except SimulationFailed:
                    verdict = f'("{case}", "{body}", "{name}"),  # {time.process_time() - start:.1f} s'
                    break
        typer.echo(f'    "{site.key}": {verdict}')


if __name__ == "__main__":
    typer.run(main)
