"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .disconnect import until_disconnect
from .errors import NoClientError, as_api_error

DONE = b"data: [DONE]\n\n"
log = logging.getLogger(__name__)


def event(data: bytes) -> bytes:
    """One event. JSON has no raw line breaks, so the data is one line."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends events as they come, and closes their source however it ends: also when the client goes away.

    The first event is awaited before anything is sent, so that an error before it is a plain HTTP error. A later one
    is an event {"error": …}, and ends the stream without [DONE].

    Args:
        events: whole events, `DONE` included.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        # X-Accel-Buffering keeps nginx from collecting events.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(scope, receive, send))
        except NoClientError:
            log.debug("client disconnected from %s", scope["path"])

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send_all(scope, receive, send)
        finally:
            await self._events.aclose()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for piece in self._events:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            if not started:
                raise
            told = as_api_error(error)
            if told.status == 500:
                log.exception("a stream failed")
            await send({"type": "http.response.body", "body": event(told.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
