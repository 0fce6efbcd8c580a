"""Checks a commit message: the commit-msg hook of pre-commit (CONTRIBUTING.md, "Commits").

python tools/check_commit_message.py .git/COMMIT_EDITMSG
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

MAX_SUBJECT = 72
SUBJECT = re.compile(r"[a-z][a-z0-9_/-]*(, [a-z][a-z0-9_/-]*)*: \S.*")
ABSOLUTE_PATH = re.compile(r"(?:^|[\s('\"`])/(?:home|root|work|tmp|Users|mnt|opt|var)/\w+")


def problems_of(message: str) -> list[str]:
    """What is wrong with a message, a sentence each; empty where nothing is."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    found = []
    if subject.startswith("Merge "):
        return ["This is a merge commit. Rebase instead."]
    if len(subject) > MAX_SUBJECT:
        found.append(f"The subject has {len(subject)} characters; the limit is {MAX_SUBJECT}.")
    if not SUBJECT.fullmatch(subject):
        found.append("The subject does not read `area: what`, for example `kernels: check arrival by 32-bit words`.")
    if subject.endswith("."):
        found.append("The subject ends with a full stop.")
    if len(lines) > 1 and lines[1].strip():
        found.append("The second line is not blank.")
    if ABSOLUTE_PATH.search(message):
        found.append("The message holds a path of one machine.")
    return found


def main() -> None:
    """Exits with 1 and prints the problems of the message file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("message", type=Path, help="file with the message")
    found = problems_of(parser.parse_args().message.read_text(encoding="utf-8"))
    for problem in found:
        print(problem, file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
