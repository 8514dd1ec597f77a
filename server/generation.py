"""From a checked request to the engine and back: prompts to tokens, several prompts at once, and the usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ..core.engine.output import RequestOutput
from ..core.errors import RequestError, UnavailableError
from ..core.sampling.params import SamplingParams
from .context import ServerContext
from .errors import APIError, unavailable
from .protocol import GenerationRequest, Message, Prompt

LONG_TEXT = 4096
"""Characters from which tokenization leaves the event loop's thread."""

TEMPLATE_ARGUMENTS = {"self", "messages", "tools", "add_generation_prompt", "continue_final_message"}


@dataclass
class Usage:
    """Tokens of a request so far: of all prompts, of all completions, and by prompt those from the prefix cache."""

    prompt: int = 0
    completion: int = 0
    cached: dict[int, int] = field(default_factory=dict)

    def add(self, position: int, output: RequestOutput) -> None:
        """Counts one delta of the prompt at a position."""
        self.completion += sum(len(delta.token_ids) for delta in output.outputs)
        self.cached[position] = output.num_cached_tokens

    def as_dict(self) -> dict[str, Any]:
        """The protocol's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


@dataclass
class Job:
    """One HTTP request, ready for the engine.

    Attributes:
        id: the id of the answer.
        prompts: token ids, prompt by prompt.
        params: how to sample.
        priority, cache_salt: as EngineRequest's.
        created: when, in seconds since 1970.
        arrival: when, by the performance counter.
        usage: tokens so far.
    """

    id: str
    prompts: list[list[int]]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    arrival: float = field(default_factory=time.perf_counter)
    usage: Usage = field(default_factory=Usage)


async def encode_prompt(context: ServerContext, prompt: Prompt, add_special_tokens: bool, param: str) -> list[int]:
    """A prompt's tokens.

    Raises:
        APIError: it names a token that the model does not have.
        RequestError: it is not valid Unicode.
    """
    if isinstance(prompt, str):
        tokenizer = context.tokenizer
        if len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(tokenizer.encode, prompt, add_special_tokens, param=param)
        return tokenizer.encode(prompt, add_special_tokens, param=param)
    size = context.engine.info.vocab_size
    if prompt and not (min(prompt) >= 0 and max(prompt) < size):
        wrong = next(token for token in prompt if not 0 <= token < size)
        raise APIError(400, f"{param} has token {wrong}; this model's tokens are 0 to {size - 1}.", param=param)
    return prompt


async def encode_messages(
    context: ServerContext,
    messages: Sequence[Message],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: Mapping[str, Any] | None,
) -> list[int]:
    """A chat's tokens.

    Raises:
        APIError: template_kwargs has a name that the request has a field for.
        RequestError: the model has no template, or it refuses the messages.
    """
    for name in TEMPLATE_ARGUMENTS & (template_kwargs or {}).keys():
        text = f"chat_template_kwargs cannot have {name!r}; it is a field of the request itself."
        raise APIError(400, text, param="chat_template_kwargs", code="invalid_value")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    tokenizer = context.tokenizer
    plain = [message.model_dump(exclude_unset=True) for message in messages]

    def encode() -> list[int]:
        return tokenizer.encode_chat(
            plain,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=bool(continue_final_message),
            **(template_kwargs or {}),
        )

    size = sum(len(str(message.content)) for message in messages)
    return await asyncio.to_thread(encode) if size > LONG_TEXT else encode()


def make_job(
    context: ServerContext,
    request: GenerationRequest,
    prompts: list[list[int]],
    id: str,
    default_max_tokens: int | None,
    param: str,
    **changes: Any,
) -> Job:
    """Fits a request into the model's context and vocabulary.

    Args:
        default_max_tokens: for a request that brings no max_tokens; None is up to the context's end.
        param: what the client calls the prompt.
        changes: SamplingParams fields that the route sets.

    Raises:
        APIError: it does not fit.
        RequestError: a field names a token that the model does not have.
    """
    limit = context.engine.info.max_model_len
    longest = max(len(prompt) for prompt in prompts)
    if not min(len(prompt) for prompt in prompts):
        raise APIError(400, f"{param} has no tokens; give at least one.", param=param, code="invalid_value")
    if longest >= limit:
        text = (
            f"{param} has {longest} tokens, but this model's context is {limit} tokens, and at least one is needed "
            f"for the answer. Shorten it to {limit - 1} tokens."
        )
        raise APIError(400, text, param=param, code="context_length_exceeded")
    given = {**request.params_given(), **changes}
    asked = given.get("max_tokens")
    if asked is not None and longest + asked > limit:
        name = request.client_name("max_tokens")
        text = (
            f"{param} has {longest} tokens and {name} is {asked}: {longest + asked} in all, but this model's context "
            f"is {limit} tokens. Lower {name} to {limit - longest}, or shorten {param}."
        )
        raise APIError(400, text, param=name, code="context_length_exceeded")
    if asked is None and default_max_tokens is not None:
        changes["max_tokens"] = max(min(default_max_tokens, limit - longest), 1)
    if context.engine.tokenizer is None:
        changes["detokenize"] = False
    params = request.sampling_params(context.engine.generation_defaults, **changes)
    params.check_vocabulary(context.engine.info.vocab_size)
    job = Job(id, prompts, params, request.priority or 0, request.cache_salt or "")
    job.usage.prompt = sum(len(prompt) for prompt in prompts)
    return job


async def run(context: ServerContext, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The deltas of all prompts of a job as (position of the prompt, delta). Closing it aborts what is not done.

    Raises:
        APIError: the engine failed on the request, or the server stops now.
        OctavoError: from the engine.
    """
    source = _one(context, job, 0) if len(job.prompts) == 1 else _several(context, job)
    async with aclosing(source):
        async for position, output in source:
            job.usage.add(position, output)
            for delta in output.outputs:
                if delta.finish_reason == "error":
                    text = output.error or "The engine failed on this request; the server's log says why."
                    raise APIError(500, text, type="server_error", code="engine_error")
                if delta.finish_reason == "abort":
                    raise unavailable("The request was ended before it was complete: the server stops.", "aborted")
            yield position, output


async def _one(context: ServerContext, job: Job, position: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The deltas of one prompt."""
    name = job.id if len(job.prompts) == 1 else f"{job.id}-{position}"
    timer = context.metrics.timer(job.arrival, job.params.n)
    outputs = context.engine.generate(
        job.prompts[position], job.params, name, priority=job.priority, cache_salt=job.cache_salt
    )
    context.active.add(name)
    try:
        async with aclosing(outputs):
            async for output in outputs:
                timer.observe(output)
                yield position, output
    except (RequestError, UnavailableError):
        timer.refused()
        raise
    finally:
        context.active.discard(name)
        timer.close()


async def _several(context: ServerContext, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The deltas of several prompts, as they come."""
    queue: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue()

    async def pump(position: int) -> None:
        try:
            async with aclosing(_one(context, job, position)) as source:
                async for item in source:
                    queue.put_nowait(item)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(i)) for i in range(len(job.prompts))]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if item is not None:
                yield item
                continue
            unfinished -= 1
            for task in tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    task.result()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
