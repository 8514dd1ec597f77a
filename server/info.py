"""The routes that tell about the server: models, health, version, metrics, and the tokenizer."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ..core.errors import EngineDeadError
from .context import ServerContext, read
from .errors import APIError, unavailable
from .generation import encode_messages, encode_prompt
from .metrics import CONTENT_TYPE
from .openapi import json_body
from .protocol import DetokenizeRequest, TokenizeRequest
from .version import version

router = APIRouter()


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests are taken; 503 once the server drains, or its engine is dead."""
    context = ServerContext.of(request)
    try:
        context.check_open()
    except EngineDeadError as error:
        raise unavailable(str(error), "engine_dead") from error
    return _json({"status": "ok"})


@router.get("/version")
async def get_version() -> Response:
    """The server's version."""
    return _json({"version": version()})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(ServerContext.of(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The models served: one."""
    return _json({"object": "list", "data": [_card(ServerContext.of(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One model."""
    context = ServerContext.of(request)
    context.check_model(name)
    return _json(_card(context))


def _card(context: ServerContext) -> dict[str, Any]:
    return {
        "id": context.model,
        "object": "model",
        "created": context.started,
        "owned_by": "octavo",
        "root": context.engine.info.model,
        "max_model_len": context.engine.info.max_model_len,
    }


@router.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """A prompt's or a chat's tokens."""
    context = ServerContext.of(request)
    body = await read(request, TokenizeRequest)
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "Give prompt or messages, one of them.", param="prompt")
    if body.messages is not None:
        tokens = await encode_messages(
            context, body.messages, body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
        )
    else:
        tokens = await encode_prompt(context, body.prompt or "", body.add_special_tokens is not False, "prompt")
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": context.engine.info.max_model_len,
        "tokens": tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = [context.tokenizer.id_to_token(token) for token in tokens]
    return _json(answer)


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of tokens, special ones included."""
    context = ServerContext.of(request)
    body = await read(request, DetokenizeRequest)
    context.check_model(body.model)
    tokens = await encode_prompt(context, body.tokens, False, "tokens")
    return _json({"prompt": context.tokenizer.decode(tokens, skip_special_tokens=False)})
