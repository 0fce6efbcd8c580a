"""Searches for each place that orders accesses a run that notices its loss: python -m tests.simulator [PART_OF_KEY]."""

import contextlib
import itertools
import sys
import time
from dataclasses import replace

from tests.simulator.cases import CASES, bodies_of
from tests.simulator.runs import CONDITIONS, SimulationFailed, run
from tests.simulator.sites import ordering_sites


def search(part: str) -> None:
    """Print for each site whose key has `part` the run that notices its weakening, as a line of test_sites.py."""
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
        sys.stdout.write(f'    "{site.key}": {verdict}\n')


if __name__ == "__main__":
    search(sys.argv[1] if len(sys.argv) > 1 else "")
