"""`octavo serve` on a host that is not rank 0: no HTTP, only what rank 0 tells it.

A first SIGTERM or SIGINT is only noted: often all hosts get one, and rank 0 needs this one until its requests are
done. It then ends this host as well. A second one ends it at once. Exit codes: 0 after an orderly end, 1 when rank 0 is
lost or a call failed, 128 + signal.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from types import FrameType

from ..core.config import EngineConfig
from ..core.engine.build import follow_engine
from ..core.errors import OctavoError
from ..core.executor.follower import end_process
from .serve import SAME_SIGNAL, SIGNALS


def follow(config: EngineConfig) -> int:
    """Follows rank 0 until it ends. Returns the exit code.

    Raises:
        OctavoError: it could not join rank 0. What comes later ends the process.
    """
    signalled: list[float] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if signalled and now - signalled[-1] < SAME_SIGNAL:
            return
        signalled.append(now)
        if len(signalled) > 1:
            os._exit(128 + number)
        say(f"{signal.Signals(number).name}: this host ends with rank 0; once more to end it now, and rank 0 with it.")

    joined = False

    def on_joined() -> None:
        nonlocal joined
        joined = True
        for number in SIGNALS:
            signal.signal(number, on_signal)

    def say(line: str) -> None:
        print(f"octavo: {line}", flush=True)

    try:
        follow_engine(config, say, on_joined)
    except Exception as error:
        if not joined:
            raise
        # At once: libraries would say good-bye, at their exit, to hosts that may be gone, and some abort over that.
        end_process(str(error) if isinstance(error, OctavoError) else traceback.format_exc())
    return 0
