"""The HTTP server of one engine. Apart from `serve.py`, as importing its packages takes a third of a second."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn

from ..core.engine.async_engine import AsyncEngine
from .app import create_app
from .context import ServerContext
from .settings import ServerOptions


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: here the first signal drains.

    Attributes:
        context: the app's.
    """

    def __init__(self, engine: AsyncEngine, options: ServerOptions) -> None:
        app = create_app(engine, options)
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        self.context: ServerContext = app.state.context

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
