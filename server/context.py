"""What all routes of one app share: the engine, the options, the metrics, and the requests under way."""

from __future__ import annotations

import time
import uuid
from typing import cast

from starlette.requests import Request

from ..core.engine.async_engine import AsyncEngine
from ..core.errors import EngineDeadError
from ..core.tokenizer import Tokenizer
from .errors import APIError, unavailable
from .metrics import Metrics
from .protocol import AnyBody, parse
from .settings import ServerOptions


class ServerContext:
    """The state of one app.

    Attributes:
        engine: the engine.
        options: as given.
        model: the model's name in the API.
        started: when the app was made, in seconds since 1970.
        metrics: its metrics.
        draining: set once the server shuts down: requests under way finish, new ones are refused.
        active: the engine's ids of the requests under way.
    """

    def __init__(self, engine: AsyncEngine, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.model = options.served_model_name or engine.info.model
        self.started = int(time.time())
        self.metrics = Metrics(options.metrics_prefix, self.model, lambda: engine.stats)
        self.draining = False
        self.active: set[str] = set()

    @classmethod
    def of(cls, request: Request) -> ServerContext:
        """The context of the app that a request came to."""
        return cast(ServerContext, request.app.state.context)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            APIError: the model came without one.
        """
        if self.engine.tokenizer is None:
            raise APIError(400, "This model has no tokenizer: send token ids, and read token ids.", param="prompt")
        return self.engine.tokenizer

    def check_open(self) -> None:
        """Raises APIError where no request can be taken now."""
        if self.draining:
            raise unavailable("The server is shutting down; send the request to another one.", "draining")
        if self.engine.is_dead:
            raise EngineDeadError("The engine has stopped; the server's log says why. It has to be started again.")

    async def abort_all(self) -> None:
        """Ends the requests under way; their clients get an error that says so."""
        for name in list(self.active):
            await self.engine.abort(name)

    def check_model(self, name: str | None) -> None:
        """Raises APIError for a model that is not served here. None is the one that is."""
        if name is not None and name != self.model:
            text = f"The model {name!r} is not served here; this server has {self.model!r}."
            raise APIError(404, text, param="model", code="model_not_found")


async def read(request: Request, model: type[AnyBody]) -> AnyBody:
    """The request's body, checked.

    Raises:
        APIError: it is malformed.
    """
    return parse(model, await request.body())


def new_id(kind: str) -> str:
    """An id such as cmpl-6f…, unique among all servers."""
    return f"{kind}-{uuid.uuid4().hex}"
