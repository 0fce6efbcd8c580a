"""Writes the table with which `ep-a2a plan --vllm` sizes the MoE layers of vLLM's models, from vLLM's model files.

    python tools/moe_families.py FOLDER_OF_VLLM VERSION > ep_a2a/commands/plan/families.toml

FOLDER_OF_VLLM is the package's folder, of a wheel or a checkout; nothing of it is imported.
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from ep_a2a.commands.plan.model_files import Family, ModelFiles


def families_of(folder: Path) -> dict[Family, list[str]]:
    """Returns the architectures of each family."""
    files = ModelFiles(folder)
    found: dict[Family, list[str]] = {}
    for architecture in sorted(files.architectures):
        if family := files.family(architecture):
            found.setdefault(family, []).append(architecture)
    return found


def text_of(families: dict[Family, list[str]], version: str, date: str) -> str:
    """Returns the table in TOML."""
    lines = ["# Written by tools/moe_families.py from vLLM's model files.", f'vllm = "{version}"', f"date = {date}"]
    for family, architectures in families.items():
        lines += ["", "[[family]]"]
        lines += [f"{name} = {json.dumps(getattr(family, name))}" for name in ("hidden", "experts", "topk")]
        lines.append(f"shares_tokens = {json.dumps(family.shares_tokens)}")
        if family.expert_dtype:
            lines.append(f"expert_dtype = {json.dumps(family.expert_dtype)}")
        lines += ["architectures = [", *(f"  {json.dumps(each)}," for each in architectures), "]"]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("version")
    options = parser.parse_args()
    sys.stdout.write(text_of(families_of(options.folder), options.version, datetime.now(UTC).date().isoformat()))
