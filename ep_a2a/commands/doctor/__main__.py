"""`python -m ep_a2a.commands.doctor`: the same as `ep-a2a doctor`, where that program is not on the path."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["doctor"]
    runpy.run_module("ep_a2a.cli", run_name="__main__", alter_sys=True)
