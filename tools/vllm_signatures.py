"""Renews ep_a2a/integrations/vllm/signatures.json from unpacked vLLM wheels.

    python tools/vllm_signatures.py FOLDER

FOLDER holds one folder per version ("0.33.0"), each with the wheel's `vllm` inside:
`pip download --no-deps vllm==0.33.0` and `unzip`. Versions that are only in the file stay in it.

The file is also the list of symbols. To add one, add the line `"file:name": "",` and run this over all versions.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

from ep_a2a.integrations.vllm.signatures import FILE_NAME, SYMBOLS, VERSIONS, read_signatures
from ep_a2a.integrations.vllm.support import BEHIND_RANGE, BETWEEN_RANGES, WITHIN_RANGE, known_signatures

TABLE = Path(__file__).parents[1] / "ep_a2a" / "integrations" / "vllm" / FILE_NAME


def main() -> None:
    """Writes the file, and prints the symbols that differ between versions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds a folder per version, each with the wheel's vllm inside")
    folder = parser.parse_args().folder
    old = known_signatures()
    found = {path.name: read_signatures(path / "vllm") for path in folder.iterdir() if (path / "vllm").is_dir()}
    known: dict[str, dict[str, list[str]]] = {}
    for symbol in SYMBOLS:
        kept = {text: [v for v in versions if v not in found] for text, versions in old.get(symbol, {}).items()}
        for version, signatures in found.items():
            kept.setdefault(signatures[symbol], []).append(version)
        known[symbol] = {text: versions for text, versions in kept.items() if versions}
    TABLE.write_text(json_of(known))
    for symbol, signatures in known.items():
        if len(signatures) > 1:
            print(symbol, *(f"\n    {versions[0]} to {versions[-1]}: {text}" for text, versions in signatures.items()))


def json_of(known: dict[str, dict[str, list[str]]]) -> str:
    """Returns the file's text: a list of all versions, and a line for each symbol with its signatures by range."""
    named = {version for signatures in known.values() for versions in signatures.values() for version in versions}
    versions = sorted(named, key=lambda version: [int(part) for part in version.split(".") if part.isdigit()])
    table: dict[str, object] = {VERSIONS: versions}
    for symbol, signatures in known.items():
        by_version = {version: text for text, theirs in signatures.items() for version in theirs}
        table[symbol] = _ranges([by_version.get(version) for version in versions], versions)
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _ranges(texts: list[str | None], versions: list[str]) -> str:
    """Joins the signature of each version, None where it is not known, into ranges of versions."""
    ranges = []
    for text, group in itertools.groupby(zip(texts, versions), key=lambda each: each[0]):
        members = [version for _, version in group]
        if text is not None:
            span = members[0] if len(members) == 1 else f"{members[0]}{WITHIN_RANGE}{members[-1]}"
            ranges.append(f"{span}{BEHIND_RANGE}{text}")
    return BETWEEN_RANGES.join(ranges)


if __name__ == "__main__":
    main()
