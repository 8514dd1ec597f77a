"""A real server in a thread, over the fake engine in its own process: for clients of all kinds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import fake_engine
import httpx
import uvicorn

from octavo.core.config import EngineConfig
from octavo.core.engine.async_engine import AsyncEngine
from octavo.server.app import create_app
from octavo.server.context import ServerContext
from octavo.server.settings import ServerOptions


class LiveServer:
    """Starts at `with`. The fake engine takes `delay` seconds per step, and answers a prompt with its own bytes."""

    def __init__(self, delay: float = 0.0, options: ServerOptions | None = None, **config: Any) -> None:
        self._config = EngineConfig(backend_option={"delay": str(delay)}, **config)
        self._options = options or ServerOptions()
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.engine: AsyncEngine
        self.context: ServerContext
        self.url = ""

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._up.wait(30), "the server did not start"
        self.http = httpx.Client(base_url=self.url, timeout=20)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.engine = await AsyncEngine.start(
            self._config, builder=fake_engine.BUILDER, open_frontend=fake_engine.frontend
        )
        app = create_app(self.engine, self._options)
        self.context = app.state.context
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        )
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        self._up.set()
        await self._stop.wait()
        server.should_exit = True
        await serving
        await self.engine.close()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        """Waits until something about the server has become true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not become true in time"
            time.sleep(0.01)
