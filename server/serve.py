"""`octavo serve`: the engine, the HTTP server, and their end.

The socket is bound before the model is loaded, so that a port in use is told at once. The first SIGTERM or SIGINT
stops the listening and lets requests under way finish, for `drain_timeout` seconds at most; a second one ends it.
Exit codes: 0 after a signal and an orderly end, 1 when the engine died, 128 + signal when a signal came before the
server was ready, or came twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.config import EngineConfig
from ..core.engine.async_engine import AsyncEngine
from ..core.errors import ConfigError
from ..core.progress import StartProgress
from .settings import ServerOptions
from .version import version

if TYPE_CHECKING:
    from .context import ServerContext
    from .http import Server

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_SIGNAL = 0.5
"""Seconds in which signals count as one: `timeout` and other wrappers send one to the process and one to its group."""
LAST_WORDS = 2.0
"""Seconds for clients to read the error that ended their requests."""


@dataclass(frozen=True)
class ServeOptions:
    """Where to listen, and how to end.

    Attributes:
        host, port: the address; port 0 takes a free one.
        drain_timeout: seconds for requests under way once the server is told to stop.
        server: the HTTP side's options.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_timeout: float = 30.0
    server: ServerOptions = field(default_factory=ServerOptions)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address. It does not listen yet, so that nobody waits for a model that still loads.

    Raises:
        ConfigError: the address cannot be had.
    """
    sock = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        if sock is not None:
            sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"Cannot listen on {host} port {port}: {reason}. Choose another with --host and --port, or stop what uses "
            "it; --port 0 takes any free one."
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a bound socket can be reached."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(config: EngineConfig, options: ServeOptions) -> int:
    """Serves until a signal ends it. Returns the exit code.

    Raises:
        OctavoError: it could not be started.
    """
    sock = bind(options.host, options.port)
    with contextlib.closing(sock):
        return asyncio.run(_Serving(config, options, sock).run())


class _Serving:
    """One run of the server."""

    def __init__(self, config: EngineConfig, options: ServeOptions, sock: socket.socket) -> None:
        self._config, self._options, self._socket = config, options, sock
        self._signals: list[int] = []
        self._signalled = 0.0
        self._stop = asyncio.Event()
        self._ready = False
        self._task: asyncio.Task[int] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        self._task = asyncio.ensure_future(self._serve())
        try:
            return await self._task
        except asyncio.CancelledError:
            if not self._signals:
                raise
            return 128 + self._signals[-1]
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._signals and now - self._signalled < SAME_SIGNAL:
            return
        self._signals.append(number)
        self._signalled = now
        assert self._task is not None
        if self._ready and len(self._signals) == 1:
            self._stop.set()
        else:
            self._task.cancel()

    async def _serve(self) -> int:
        # Imported while the engine's process imports what it needs.
        importing = asyncio.ensure_future(asyncio.to_thread(importlib.import_module, ".http", __package__))
        with contextlib.closing(StartProgress()) as progress:
            engine = await AsyncEngine.start(self._config, on_progress=progress, on_log=self._on_log)
        try:
            server: Server = (await importing).Server(engine, self._options.server)
            serving = asyncio.ensure_future(server.serve(sockets=[self._socket]))
            try:
                return await self._until_stopped(engine, server, serving)
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
        finally:
            await engine.close()

    async def _until_stopped(self, engine: AsyncEngine, server: Server, serving: asyncio.Future[None]) -> int:
        while not server.started:
            if serving.done():
                serving.result()
                raise ConfigError("The HTTP server could not be started; the log says why.")
            await asyncio.sleep(0.01)
        self._ready = True
        self._announce(engine, server.context)
        while not self._stop.is_set() and not engine.is_dead:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 0.25)
        for listener in server.servers:
            listener.close()
        deadline = time.monotonic() + self._options.drain_timeout
        if engine.is_dead:
            print("octavo: the engine has stopped; the server ends.", file=sys.stderr, flush=True)
        else:
            await self._drain(engine, server.context)
        # The engine is done; what clients have not read yet may take what is left of the time.
        left = max(deadline - time.monotonic(), LAST_WORDS)
        server.config.timeout_graceful_shutdown = math.ceil(left)
        server.should_exit = True
        await asyncio.wait({serving}, timeout=left + 1)
        return 1 if engine.is_dead else 0

    async def _drain(self, engine: AsyncEngine, context: ServerContext) -> None:
        context.draining = True
        timeout = self._options.drain_timeout
        if context.active:
            text = f"octavo: finishing {len(context.active)} requests, for {timeout:g} s at most; once more to end now."
            print(text, file=sys.stderr, flush=True)
        if not await engine.drain(timeout):
            print(f"octavo: ending {len(context.active)} requests that did not finish.", file=sys.stderr, flush=True)
            await context.abort_all()
            await engine.drain(LAST_WORDS)

    def _on_log(self, line: str) -> None:
        # What one engine says while it starts is about its choices, and those are announced when it is ready. That of
        # several hosts says for whom it waits.
        log.log(logging.INFO if self._ready or self._config.num_hosts > 1 else logging.DEBUG, line)

    def _announce(self, engine: AsyncEngine, context: ServerContext) -> None:
        info = engine.info
        lines = [
            f"Octavo {version()} is ready: {url_of(self._socket)}",
            f"  model {context.model} ({info.family}) on {info.device}, {info.dtype}, KV cache {info.kv_dtype}: "
            f"{info.kv_blocks} blocks of {info.block_size} tokens",
            f"  context {info.max_model_len} tokens, {info.max_num_seqs} sequences at once, "
            f"{info.max_num_batched_tokens} tokens per step",
            *(f"  {choice}" for choice in info.choices),
        ]
        print("\n".join(lines), flush=True)
