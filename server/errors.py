"""Errors in the shape of the OpenAI protocol: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..core.errors import EngineDeadError, OctavoError, OutOfMemoryError, RequestError, UnavailableError

RETRY_AFTER = {"Retry-After": "5"}


class APIError(Exception):
    """An error for the client.

    Attributes:
        status: the HTTP status.
        message: what is wrong, why, and what to change.
        type: the protocol's kind of error.
        param: the request's field that is wrong.
        code: a name for programs.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        """The HTTP response."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


class NoClientError(Exception):
    """The client has gone; there is nobody to answer."""


def unavailable(message: str, code: str = "unavailable") -> APIError:
    """503: later, or elsewhere, the same request would succeed."""
    return APIError(503, message, type="service_unavailable", code=code, headers=RETRY_AFTER)


def as_api_error(error: BaseException) -> APIError:
    """What the client is told about any error. Unexpected ones say nothing about the inside."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError):
        return APIError(400, str(error), param=error.param, code="invalid_value")
    if isinstance(error, UnavailableError):
        return unavailable(str(error))
    if isinstance(error, EngineDeadError):
        return APIError(503, str(error), type="service_unavailable", code="engine_dead")
    if isinstance(error, OutOfMemoryError):
        return APIError(503, str(error), type="service_unavailable", code="out_of_memory")
    if isinstance(error, OctavoError):
        return APIError(500, str(error), type="server_error", code="engine_error")
    return APIError(500, "The server failed on this request; its log says why.", type="server_error", code="internal")


async def on_error(request: Request, error: Exception) -> Response:
    """FastAPI's handler for every error of a route."""
    if isinstance(error, ClientDisconnect | NoClientError):
        return Response(status_code=499)  # never seen by anybody; 499 is nginx's "client closed request"
    return as_api_error(error).response()


async def on_http_error(request: Request, error: Exception) -> Response:
    """FastAPI's handler for routing errors: an unknown path, a method that it does not have."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 404:
        text, code = f"There is no {method} {path}. The API is under /v1, for example /v1/models.", "not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        text, code = f"{path} does not take {method}; it takes {allowed}.", "method_not_allowed"
    else:
        text, code = str(error.detail), "http_error"
    return APIError(error.status_code, text, code=code, headers=error.headers).response()


def validation_error(details: Mapping[str, Any]) -> APIError:
    """400 for the first of pydantic's complaints."""
    kind, message = details["type"], details["msg"]
    param = param_name(details["loc"]) or None
    if kind == "json_invalid":
        return APIError(400, f"The request's body is not valid JSON in UTF-8: {message}.", code="invalid_json")
    if kind == "missing":
        return APIError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        text = f"Unrecognized request argument: '{param}'. Leave it out; it would have no effect here."
        return APIError(400, text, param=param, code="unknown_parameter")
    if param is None:
        return APIError(400, f"The request's body is wrong: {message}.", code="invalid_type")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return APIError(400, f"Invalid value for '{param}': {message}.", param=param, code=code)


def param_name(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") → "messages[0].content"."""
    out = ""
    for part in loc:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out
