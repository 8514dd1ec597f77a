"""What the generating routes have in common: read, check, prepare, and answer whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from .context import ServerContext, read
from .disconnect import until_disconnect
from .protocol import GenerationRequest
from .sse import EventStream

Body = TypeVar("Body", bound=GenerationRequest)


class Answer(Protocol):
    """One request's answer."""

    def stream(self) -> AsyncGenerator[bytes, None]:
        """In pieces, each an event of the stream."""
        ...

    async def whole(self) -> bytes:
        """At once, as JSON."""
        ...


async def respond(
    request: Request, kind: type[Body], prepare: Callable[[ServerContext, Body], Awaitable[Answer]]
) -> Response:
    """Serves one request.

    Args:
        kind: what its body is.
        prepare: checks it against the model and makes its answer.

    Raises:
        APIError, RequestError, UnavailableError: it cannot be served.
    """
    context = ServerContext.of(request)
    context.check_open()
    body = await read(request, kind)
    context.check_model(body.model)
    body.check()
    answer = await prepare(context, body)
    if body.stream:
        return EventStream(answer.stream())
    content = await until_disconnect(request.receive, answer.whole())
    return Response(content, media_type="application/json")
