"""The FastAPI app: routes, middleware and error handlers, put together."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from ..core.engine.async_engine import AsyncEngine
from ..core.errors import OctavoError
from . import chat, completions, info
from .context import ServerContext
from .errors import APIError, NoClientError, on_error, on_http_error
from .middleware import APIKey, BodyLimit, RequestId
from .settings import ServerOptions
from .version import version


def create_app(engine: AsyncEngine, options: ServerOptions | None = None) -> FastAPI:
    """An app that serves one engine. `app.state.context` is its ServerContext.

    Raises:
        ConfigError: an option has a value that cannot be honoured.
    """
    options = options or ServerOptions()
    app = FastAPI(title="Octavo", version=version(), redirect_slashes=False)
    app.state.context = ServerContext(engine, options)
    for module in (completions, chat, info):
        app.include_router(module.router)
    for kind in (APIError, OctavoError, NoClientError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, limit=options.max_body_size)
    if options.api_key:
        app.add_middleware(APIKey, key=options.api_key)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(RequestId)
    return app
