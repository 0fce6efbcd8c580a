"""Odd inputs of every command: what is typed, the exit code, and a part of what is said.

FILE stands for a file that exists, FOLDER for an empty folder, {model} for a model's config.json, NONE for a path in no
folder, LONG for a name that no file system takes.
"""

import shlex
import tomllib
from pathlib import Path

FILE, FOLDER, NONE, LONG = "{file}", "{folder}", "/nowhere/x", "{folder}/" + "x" * 300

SIZES = {
    "demo": ("ranks", "tokens", "hidden", "experts", "topk"),
    "trace": ("ranks", "tokens", "hidden", "experts", "topk", "steps"),
    "plan": ("ranks", "max-tokens", "hidden", "experts", "topk", "gpus-per-node"),
}
LISTS = ("ranks", "tokens", "hidden", "topk", "experts", "max-sms", "gpus-per-node")
NUMBERS = ("0", "-1", "1.5", "abc", "", "99999999999999999999")
COMMANDS = ("demo", "bench", "trace", "plan", "backends", "doctor")

Case = tuple[tuple[str, ...], int, str]


def _cases() -> list[Case]:
    found: list[Case] = [
        ((command, f"--{name}", number), 2, f"--{name}")
        for command, names in SIZES.items()
        for name in names
        for number in NUMBERS
    ]
    found += [(("bench", f"--{name}", text), 2, f"--{name}") for name in LISTS for text in ("-1", "1,x", ",", "9" * 30)]
    for command in COMMANDS:
        found += [
            ((command, "--wrong"), 2, "--wrong"),
            ((command, "-q", "-v"), 2, "exclude each other"),
            ((command, "-h"), 0, "Exit codes"),
            ((command, "--help"), 0, "Exit codes"),
            ((command, "one", "two"), 2, "unexpected extra argument"),
        ]
    for command in ("demo", "plan", "backends", "doctor", "bench", "trace"):
        found += [((command, "--output", path), 2, "expected") for path in (NONE, LONG, FOLDER, f"{FILE}/x")]
    return found


def _typed(line: str) -> tuple[str, ...]:
    return tuple(word.replace("{long}", LONG) for word in shlex.split(line))


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CASES: list[Case] = [
    *_cases(),
    *((_typed(line), 2, said) for line, said in _TABLE["refused"]),
    *((_typed(line), 0, said) for line, said in _TABLE["answered"]),
]
VARIABLES: list[tuple[str, str]] = [(name, value) for name, value in _TABLE["variables"]]
"""Variables that cannot be used: a command refuses them, and --help does not look."""
