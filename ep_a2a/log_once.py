"""Log messages that would come again with every layer or step."""

import functools
import logging


@functools.cache
def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Logs a message the first time in a process, with the caller's place."""
    logger.log(level, "%s", message, stacklevel=2)
