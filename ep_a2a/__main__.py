"""Runs the command line: `python -m ep_a2a` is `ep-a2a`."""

from ep_a2a.cli import main

if __name__ == "__main__":
    main()
