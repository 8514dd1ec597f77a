"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ..core.engine.output import CompletionOutput, RequestOutput
from .answer import respond
from .context import ServerContext, new_id
from .errors import APIError
from .generation import Job, encode_messages, make_job, run
from .logprobs import chat_logprobs, prompt_logprobs
from .openapi import json_body
from .protocol import ChatRequest
from .sse import DONE, event

router = APIRouter()
encode = msgspec.json.encode


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    return await respond(request, ChatRequest, prepare)


async def prepare(context: ServerContext, body: ChatRequest) -> ChatAnswer:
    """Checks a request against the model.

    Raises:
        APIError, RequestError: it cannot be served.
    """
    if context.engine.tokenizer is None:
        raise APIError(400, "This model has no tokenizer, so it cannot take messages.", param="messages")
    prompt = await encode_messages(
        context, body.messages, body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
    )
    job = make_job(context, body, [prompt], new_id("chatcmpl"), None, "messages")
    return ChatAnswer(context, body, job)


class ChatAnswer:
    """The answer to one request, whole or in pieces."""

    def __init__(self, context: ServerContext, body: ChatRequest, job: Job) -> None:
        self._context, self._body, self._job = context, body, job
        self._begun: set[int] = set()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._job.id, "object": kind, "created": self._job.created, "model": self._context.model}

    async def whole(self) -> bytes:
        """The response's JSON."""
        merged: RequestOutput | None = None
        async with aclosing(run(self._context, self._job)) as outputs:
            async for _, output in outputs:
                if merged is None:
                    merged = output
                else:
                    merged.merge(output)
        assert merged is not None, "the engine ended a request without an output"
        response = self._head("chat.completion")
        response["choices"] = [
            {
                "index": completion.index,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                **self._rest(completion),
            }
            for completion in merged.outputs
        ]
        response["usage"] = self._job.usage.as_dict()
        if self._body.return_token_ids:
            response["prompt_token_ids"] = self._job.prompts[0]
        if self._body.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs(
                self._context.engine.tokenizer, merged.prompt_logprobs, self._body.prompt_logprobs
            )
        return encode(response)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response's events."""
        # One object per delta is encoded; what all events share is encoded once.
        head = encode(self._head("chat.completion.chunk"))[:-1] + b',"choices":['
        tail = b'],"usage":null}' if self._body.include_usage else b"]}"
        async with aclosing(run(self._context, self._job)) as outputs:
            async for _, output in outputs:
                for completion in output.outputs:
                    if completion.index not in self._begun:
                        yield event(head + self._opening(completion.index) + tail)
                    delta = {"content": completion.text}
                    choice = {"index": completion.index, "delta": delta, **self._rest(completion)}
                    yield event(head + encode(choice) + tail)
        if self._body.include_usage:
            usage = {"choices": [], "usage": self._job.usage.as_dict()}
            yield event(encode({**self._head("chat.completion.chunk"), **usage}))
        yield DONE

    def _opening(self, index: int) -> bytes:
        """The first chunk of a choice, which says who speaks."""
        self._begun.add(index)
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._job.prompts[0]
        return encode(choice)

    def _rest(self, completion: CompletionOutput) -> dict[str, Any]:
        """What a whole choice and a delta have in common."""
        logprobs = None
        if self._body.logprobs:
            count = self._body.top_logprobs or 0
            logprobs = chat_logprobs(self._context.tokenizer, completion.logprobs or [], count)
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": completion.finish_reason}
        if completion.stop_reason is not None:
            rest["stop_reason"] = completion.stop_reason
        if self._body.return_token_ids:
            rest["token_ids"] = completion.token_ids
        return rest
