"""The engine's process: an EngineCore behind two ZeroMQ sockets, and the handle that its parent has on it."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import msgspec
import zmq

from ..config import EngineConfig
from .messages import Command, Event, Failure, Fatal, Log, Outputs, Progress, Ready, Shutdown, Work

BUILDER = f"{__package__}.build:build_engine"  # under whatever name this package was imported
STATS_EVERY = 1.0  # seconds between two reports while steps put nothing out
CHECK_EVERY = 1000  # milliseconds between two looks at an idle engine's device
LINGER = 2000  # milliseconds that the child waits at its end for its last message to be read
# sockaddr_un takes 104 bytes on macOS, 108 on Linux, the final zero included.
MAX_SOCKET_PATH = 100


def run_engine(builder: str, config: EngineConfig, directory: str) -> None:
    """The process's target: builds the engine, serves it, and ends.

    Args:
        builder: "module:function" with the signature of `build_engine`.
        config: its first argument.
        directory: holds the sockets.
    """
    # Ctrl-C and a supervisor's SIGTERM reach the whole process group; the parent is the one to drain and then to
    # end this process, by message or by SIGKILL.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent(directory)
    with zmq.Context() as context:
        commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        commands.set_hwm(0)
        commands.bind(f"ipc://{directory}/commands")
        events.set_hwm(0)
        events.linger = LINGER
        events.connect(f"ipc://{directory}/events")
        try:
            _serve(_load(builder), config, commands, events)
        finally:
            commands.close()
            events.close()


def _end_with_parent(directory: str) -> None:
    """Ends this process when its parent is gone, even while it loads or a step hangs; removes the directory."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="octavo-parent-watch", daemon=True).start()


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _serve(build: Callable[..., Any], config: EngineConfig, commands: zmq.Socket, events: zmq.Socket) -> None:
    encoder = msgspec.msgpack.Encoder()

    def send(event: Event) -> None:
        events.send(encoder.encode(event))

    try:
        engine = build(
            config,
            progress=lambda phase, done, total: send(Progress(phase, done, total)),
            log=lambda line: send(Log(line)),
        )
        try:
            send(Ready(engine.info))
            EngineLoop(engine, commands, send).run()
        finally:
            engine.close()
    except Exception as error:
        send(Fatal(Failure.of(error, traceback.format_exc())))


class EngineLoop:
    """Serves an engine until it is told to shut down.

    Args:
        engine: an EngineCore.
        commands: where commands come from.
        send: where events go.
    """

    def __init__(self, engine: Any, commands: zmq.Socket, send: Callable[[Event], None]) -> None:
        self._engine = engine
        self._commands = commands
        self._send = send
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._refused: list[tuple[str, Failure]] = []
        self._aborted = False
        self._told = time.monotonic()

    def run(self) -> None:
        """Runs until Shutdown. What a step raises passes through."""
        while self._take_commands():
            # After an abort there is a step even with nothing left to run: it tells that the requests have ended.
            outputs = self._engine.step() if self._engine.has_work or self._aborted else []
            self._aborted = False
            if outputs or self._refused or time.monotonic() - self._told > STATS_EVERY:
                self._send(Outputs(outputs, self._refused, self._engine.stats()))
                self._refused = []
                self._told = time.monotonic()

    def _take_commands(self) -> bool:
        """Obeys the commands that are there; waits for one while there is nothing to do. False is Shutdown."""
        if not self._engine.has_work:
            while not self._commands.poll(CHECK_EVERY):
                self._engine.check()
        while True:
            try:
                command = self._decoder.decode(self._commands.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            if isinstance(command, Shutdown):
                return False
            self._obey(command)

    def _obey(self, work: Work) -> None:
        for request in work.add:
            try:
                self._engine.add_request(request)
            except Exception as error:  # a bug that one request meets must not end the others
                self._refused.append((request.request_id, Failure.of(error, traceback.format_exc())))
        for request_id in work.abort:
            self._engine.abort(request_id)
            self._aborted = True


class EngineProcess:
    """The parent's handle: starts the process, owns the sockets' directory, and makes sure that both end.

    Attributes:
        commands_address: where to connect a PUSH socket. The process binds it; a sender that connects never waits.
        events_address: where to bind a PULL socket; the process connects to it.
    """

    def __init__(self, config: EngineConfig, builder: str) -> None:
        self._directory = _socket_directory()
        self.commands_address = f"ipc://{self._directory}/commands"
        self.events_address = f"ipc://{self._directory}/events"
        # Not daemonic: an executor in the child may start processes of its own. So it is ended at exit by hand.
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(builder, config, self._directory), name="octavo-engine"
        )

    def start(self) -> None:
        """Starts the process."""
        self._process.start()
        # Registered after multiprocessing's own exit handler, so it runs before that one waits for the child.
        atexit.register(self.kill)

    @property
    def sentinel(self) -> int:
        """A file descriptor that is readable once the process has ended."""
        return self._process.sentinel

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return self._process.pid

    def how_it_ended(self) -> str:
        """A sentence's end for an error: exit code or signal."""
        self._process.join(1.0)
        code = self._process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = "; the host may be out of memory" if name == "SIGKILL" else ""
            return f"was ended by {name}{hint}"
        return f"ended with exit code {code}"

    def join(self, timeout: float) -> None:
        """Waits for the process to end, at most `timeout` seconds."""
        self._process.join(timeout)

    def kill(self) -> None:
        """Ends the process if it has not ended, and removes the sockets. Idempotent."""
        atexit.unregister(self.kill)
        if self._process.pid is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()
        shutil.rmtree(self._directory, ignore_errors=True)


def _socket_directory() -> str:
    """A new directory that only this user can enter, with a path short enough for sockets."""
    short = len(os.fsencode(tempfile.gettempdir())) + len("/octavo-12345678/commands") <= MAX_SOCKET_PATH
    return tempfile.mkdtemp(prefix="octavo-", dir=None if short else "/tmp")
