"""Renews ep_a2a/integrations/vllm/signatures.json from unpacked vLLM wheels.

    python tools/vllm_signatures.py FOLDER

FOLDER holds one folder per version ("0.33.0"), each with the wheel's `vllm` inside:
`pip download --no-deps vllm==0.33.0` and `unzip`. Versions that the table has and FOLDER has not stay in it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ep_a2a.integrations.vllm.signatures import SYMBOLS, read_signatures
from ep_a2a.integrations.vllm.support import SIGNATURES

TABLE = Path(__file__).parents[1] / "ep_a2a" / "integrations" / "vllm" / SIGNATURES


def main(folder: Path) -> None:
    """Writes the table, and prints what has changed between versions."""
    old = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    found = {path.name: read_signatures(path / "vllm") for path in folder.iterdir() if (path / "vllm").is_dir()}
    table: dict[str, dict[str, list[str]]] = {}
    for symbol in (f"{path}:{name}" for path, names in SYMBOLS.items() for name in names):
        kept = {text: [v for v in versions if v not in found] for text, versions in old.get(symbol, {}).items()}
        for version, signatures in found.items():
            kept.setdefault(signatures[symbol], []).append(version)
        table[symbol] = {text: sorted(versions, key=_numbers) for text, versions in kept.items() if versions}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    for symbol, signatures in table.items():
        if len(signatures) > 1:
            print(symbol, *(f"\n    {versions[0]} to {versions[-1]}: {text}" for text, versions in signatures.items()))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
