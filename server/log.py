"""Logging of the commands: one handler on stderr."""

from __future__ import annotations

import logging
from enum import Enum


class LogLevel(str, Enum):
    """What --log-level takes."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def set_up(level: LogLevel) -> None:
    """Sends the logs of Octavo and of uvicorn to stderr. uvicorn's own talk of starting and stopping is for debug."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("octavo").setLevel(level.value.upper())
    uvicorn = logging.DEBUG if level is LogLevel.debug else logging.WARNING
    logging.getLogger("uvicorn").setLevel(uvicorn)
