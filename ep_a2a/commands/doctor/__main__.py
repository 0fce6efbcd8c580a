"""Runs `ep-a2a doctor` as `python -m ep_a2a.commands.doctor`."""

import sys

from ep_a2a.commands.doctor.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
