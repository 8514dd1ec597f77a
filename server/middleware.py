"""ASGI middleware: request ids, the API key, and the limit of the body's size. Plain ASGI, for streams' sake."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import APIError

OPEN_PATHS = ("/health", "/metrics")
LINGER_SECONDS = 5.0


class RequestId:
    """Every response has X-Request-Id: the client's, where it sent a sound one, or a fresh one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        await self.app(scope, receive, send_with_id)


class APIKey:
    """Refuses requests without the key. Health checks and metrics are open, CORS preflights carry no key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._matches(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        error = APIError(
            401,
            "The API key is missing or wrong; send the header 'Authorization: Bearer KEY' with the server's key.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _matches(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), self._key)


class _TooLargeError(Exception):
    pass


class BodyLimit:
    """Refuses a body that is too large as soon as that is known; it is never held in memory."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > self.limit:
            await self._refuse(receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self.limit:
                    raise _TooLargeError
            return message

        try:
            await self.app(scope, counted, send)
        except _TooLargeError:
            await self._refuse(receive, send)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        """Answers, then reads on for a moment: closing at once could destroy the answer on its way (RFC 9112, 9.6)."""
        text = f"The request's body is larger than {self.limit} bytes, which is this server's --max-body-size."
        response = APIError(413, text, code="body_too_large", headers={"Connection": "close"}).response()
        await send({"type": "http.response.start", "status": 413, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_discard(receive), LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body"):
            return
