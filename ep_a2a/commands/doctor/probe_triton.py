"""Prints what Triton says, as one line of JSON: fields of system_info.Triton.

Runs as a program, since `import triton` may fail, crash or hang.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def facts() -> dict[str, Any]:
    """Returns what Triton says; with `problem` where it cannot be imported."""
    try:
        import triton
    except ModuleNotFoundError as error:
        return {} if error.name == "triton" else {"version": "?", "problem": f"{type(error).__name__}: {error}"}
    except BaseException as error:  # noqa: BLE001 - whatever a broken library raises is the answer
        return {"version": "?", "problem": f"{type(error).__name__}: {error}"}
    if not hasattr(triton, "__version__"):
        return {"version": "?", "problem": f"the folder {list(triton.__path__)} stands in its place"}
    knobs = getattr(triton, "knobs", None)
    return {"version": str(triton.__version__), "cache_directory": str(knobs.cache.dir) if knobs else ""}


if __name__ == "__main__":
    sys.stdout.write(f"\nep_a2a_facts:{json.dumps(facts())}\n")
