"""What a logger is told, for bodies that run in rank processes, where pytest's caplog is not."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def messages_of(logger: logging.Logger, level: int = logging.NOTSET) -> Iterator[list[str]]:
    """The texts that `logger` is told within, from its own level on, or from `level` where one is given."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    if level != logging.NOTSET:
        logger.setLevel(level)
    try:
        yield texts
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
