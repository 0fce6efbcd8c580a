"""Arguments of programs that run ranks, as `type=` of argparse: a wrong one ends the program with one line."""

from argparse import ArgumentTypeError
from collections.abc import Callable

import torch


def whole(lowest: int = 1, highest: int | None = None) -> Callable[[str], int]:
    """Returns what reads an integer of at least `lowest`, and of at most `highest` where that is given."""
    expected = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = lowest - 1
        if number < lowest or (highest is not None and number > highest):
            raise ArgumentTypeError(f"expected a whole number {expected}, got {text}")
        return number

    return read


def usable_device(text: str) -> str:
    """Returns the text; `cuda` is refused where torch can use no GPU."""
    if text == "cuda" and not torch.cuda.device_count():
        raise ArgumentTypeError("expected a GPU, got none that torch can use; cpu needs none")
    return text
