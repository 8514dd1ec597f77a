"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ..core.engine.output import CompletionOutput, RequestOutput
from ..core.engine.types import TokenLogprobs
from .answer import respond
from .context import ServerContext, new_id
from .errors import APIError
from .generation import Job, encode_prompt, make_job, run
from .logprobs import CompletionLogprobs, join, prompt_logprobs
from .openapi import json_body
from .protocol import CompletionRequest
from .sse import DONE, event

router = APIRouter()
encode = msgspec.json.encode
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
async def completions(request: Request) -> Response:
    """Completes one or several prompts."""
    return await respond(request, CompletionRequest, prepare)


async def prepare(context: ServerContext, body: CompletionRequest) -> CompletionAnswer:
    """Checks a request against the model.

    Raises:
        APIError, RequestError: it cannot be served.
    """
    special = body.add_special_tokens is not False
    names = ["prompt" if len(body.prompt) == 1 else f"prompt[{i}]" for i in range(len(body.prompt))]
    encoding = (encode_prompt(context, p, special, name) for p, name in zip(body.prompt, names, strict=True))
    prompts = [await each for each in encoding]
    changes: dict[str, Any] = {}
    if body.max_tokens == 0:  # with echo: only the prompt is wanted, but the engine makes at least one token
        changes["max_tokens"] = 1
    if body.echo and body.logprobs is not None:
        changes["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    job = make_job(context, body, prompts, new_id("cmpl"), DEFAULT_MAX_TOKENS, "prompt", **changes)
    if (body.echo or body.logprobs is not None) and context.engine.tokenizer is None:
        name = "echo" if body.echo else "logprobs"
        raise APIError(400, f"{name} needs a tokenizer, and this model has none.", param=name)
    return CompletionAnswer(context, body, job)


class CompletionAnswer:
    """The answer to one request, whole or in pieces. Choice i·n + j is completion j of prompt i."""

    def __init__(self, context: ServerContext, body: CompletionRequest, job: Job) -> None:
        self._context, self._body, self._job = context, body, job
        self._only_prompt = body.max_tokens == 0
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # they come with one delta of a prompt only
        self._head: dict[str, Any] = {
            "id": job.id,
            "object": "text_completion",
            "created": job.created,
            "model": context.model,
        }

    async def whole(self) -> bytes:
        """The response's JSON."""
        merged: dict[int, RequestOutput] = {}
        async with aclosing(run(self._context, self._job)) as outputs:
            async for position, output in outputs:
                if position in merged:
                    merged[position].merge(output)
                else:
                    merged[position] = output
        choices = [
            self._choice(position, merged[position], completion)
            for position in sorted(merged)
            for completion in merged[position].outputs
        ]
        return encode({**self._head, "choices": choices, "usage": self._usage()})

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response's events."""
        # One object per delta is encoded; what all events share is encoded once.
        head = encode(self._head)[:-1] + b',"choices":['
        tail = b'],"usage":null}' if self._body.include_usage else b"]}"
        async with aclosing(run(self._context, self._job)) as outputs:
            async for position, output in outputs:
                for completion in output.outputs:
                    choice = self._choice(position, output, completion)
                    yield event(head + encode(choice) + tail)
        if self._body.include_usage:
            yield event(encode({**self._head, "choices": [], "usage": self._usage()}))
        yield DONE

    def _usage(self) -> dict[str, Any]:
        usage = self._job.usage.as_dict()
        if self._only_prompt:
            usage["completion_tokens"], usage["total_tokens"] = 0, usage["prompt_tokens"]
        return usage

    def _choice(self, position: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        body, index = self._body, position * self._job.params.n + completion.index
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[position] = output.prompt_logprobs
        text, token_ids = completion.text, completion.token_ids
        logprobs = completion.logprobs or []
        if self._only_prompt:
            text, token_ids, logprobs = "", [], []
        parts = []
        first = index not in self._begun
        self._begun.add(index)
        if first and body.echo:
            prompt = self._prompt_text(position)
            text = prompt + text
        if body.logprobs is not None:
            if first:
                parts = self._start_logprobs(index, position)
            parts.append(self._logprobs[index].add(logprobs, body.logprobs))
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": join(parts) if parts else None,
            "finish_reason": "length" if self._only_prompt and completion.finish_reason else completion.finish_reason,
        }
        if completion.stop_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if first:
                choice["prompt_token_ids"] = self._job.prompts[position]
        if body.prompt_logprobs is not None:
            found = self._prompt_logprobs.get(position)
            choice["prompt_logprobs"] = prompt_logprobs(self._context.engine.tokenizer, found, body.prompt_logprobs)
        return choice

    def _prompt_text(self, position: int) -> str:
        prompt = self._body.prompt[position]
        return prompt if isinstance(prompt, str) else self._context.tokenizer.decode(prompt, self._skip_special)

    @property
    def _skip_special(self) -> bool:
        return self._job.params.skip_special_tokens

    def _start_logprobs(self, index: int, position: int) -> list[dict[str, Any]]:
        """Begins a choice's logprobs: where the prompt is echoed, with the prompt's."""
        tokenizer, body = self._context.tokenizer, self._body
        if not body.echo:
            self._logprobs[index] = CompletionLogprobs(tokenizer, self._skip_special)
            return []
        prompt = CompletionLogprobs(tokenizer, self._skip_special)
        parts = [prompt.first(self._job.prompts[position][0])]
        parts.append(prompt.add(self._prompt_logprobs.get(position, []), body.logprobs or 0))
        self._logprobs[index] = CompletionLogprobs(tokenizer, self._skip_special, len(self._prompt_text(position)))
        return parts
