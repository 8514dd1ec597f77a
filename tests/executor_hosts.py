"""Processes for tests of several hosts: followers, and a leader that can be killed, over the hashing backend."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
import time
from contextlib import contextmanager
from typing import Any

from hash_backend import HashBackend, tiny_spec

from octavo.core.backend import Hosts, StepConstraints, StepLimits
from octavo.core.errors import OctavoError
from octavo.core.executor.follower import follow
from octavo.core.executor.leader import Leader

FACTS = {"the model's name": "hash"}
SPAWN = multiprocessing.get_context("spawn")


def free_ports() -> int:
    """A port that is free, and the next one too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


class HostBackend(HashBackend):
    """Remembers a digest of all that it was told and gave.

    Args:
        constraints: as in HashBackend.
        memory: bytes that it claims to have.
        raise_at: the submit that raises; 0 is none.
        hang_at: the submit that never returns, as a collective without its peer may not.
    """

    def __init__(
        self, constraints: StepConstraints, memory: int = 1 << 30, raise_at: int = 0, hang_at: int = 0
    ) -> None:
        super().__init__(tiny_spec(), constraints)
        self.memory_bytes, self.hang_at = memory, hang_at
        self.fail_at = {raise_at}
        self.digest = hashlib.sha256()
        self.most_outstanding = 0

    def device_memory(self):
        return self.memory_bytes, self.memory_bytes

    def load(self, model, weights, progress=None):
        self.digest.update(f"load {weights}".encode())

    def submit(self, step):
        if self.steps + 1 == self.hang_at:
            time.sleep(600)
        for array in (*step.inputs[:-1], *step.inputs.sampling):
            self.digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        handle = super().submit(step)
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        self.digest.update(handle.tokens.tobytes())
        return handle

    def import_blocks(self, blocks, contents):
        super().import_blocks(blocks, contents)
        self.digest.update(blocks.tobytes() + contents.tobytes())

    def close(self):
        self.digest.update(self.cache.layers.tobytes() + self.cache.sampled.tobytes())
        super().close()

    def summary(self) -> tuple[str, int, int, Any]:
        """(digest, steps, steps not collected, violation)."""
        return self.digest.hexdigest(), self.steps, self.outstanding, repr(self.violation)


def run_follower(port: int, rank: int, count: int, facts: dict, options: dict, results: Any) -> None:
    """A process's target: follows; sends what it logged, then its summary or its error."""
    made: list[HostBackend] = []

    def create() -> HostBackend:
        made.append(HostBackend(**options))
        return made[0]

    hosts = Hosts(f"127.0.0.1:{port}", count, rank)
    try:
        follow(hosts, facts, create, tiny_spec(), lambda: "weights", lambda line: None)  # type: ignore[arg-type]
    except (OctavoError, RuntimeError) as error:
        results.send((type(error).__name__, str(error)))
        raise SystemExit(3) from error
    results.send(("ended", made[0].summary()))


def run_leader(port: int, started: Any) -> None:
    """A process's target: starts two hosts and then does nothing until it is killed."""
    hosts = Hosts(f"127.0.0.1:{port}", 2, 0)
    leader = Leader(hosts, FACTS, lambda: HostBackend(StepConstraints()), lambda line: None)
    leader.load(tiny_spec(), "weights")  # type: ignore[arg-type]
    leader.init_cache(StepLimits(64, 4, 16, 4), 9)
    started.send(os.getpid())
    time.sleep(600)


@contextmanager
def process(target: Any, *args: Any) -> Any:
    """(a started process, a connection on which it sends); it is killed at the end."""
    here, there = SPAWN.Pipe(duplex=False)
    child = SPAWN.Process(target=target, args=(*args, there))
    child.start()
    there.close()
    try:
        yield child, here
    finally:
        child.kill()
        child.join()
