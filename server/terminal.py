"""`octavo chat` and `octavo complete`: a model in the terminal, in an engine of its own or behind a URL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..core.config import EngineConfig
from ..core.engine.async_engine import AsyncEngine
from ..core.errors import ConfigError, OctavoError, RequestError
from ..core.progress import StartProgress
from ..core.sampling.params import SamplingParams

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class ChatOptions:
    """What the chat is like.

    Attributes:
        url: the server, or None for an engine of its own.
        api_key: the server's key.
        system: the system message.
        max_tokens: tokens per answer; None is up to the context's end.
        temperature: None is the model's.
    """

    url: str | None = None
    api_key: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


class Partner(Protocol):
    """Who answers."""

    def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        """The answer, piece by piece. Closing it stops it."""
        ...

    async def close(self) -> None:
        """Ends it."""
        ...


def _params(defaults: dict[str, Any], **given: Any) -> SamplingParams:
    known = {k: v for k, v in defaults.items() if k in SamplingParams.__dataclass_fields__}
    return SamplingParams(**{**known, **{k: v for k, v in given.items() if v is not None or k == "max_tokens"}})


class LocalPartner:
    """An engine of this command's own."""

    def __init__(self, engine: AsyncEngine, options: ChatOptions) -> None:
        self._engine, self._count = engine, 0
        self._params = _params(
            engine.generation_defaults, max_tokens=options.max_tokens, temperature=options.temperature
        )

    async def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        """See Partner."""
        if self._engine.tokenizer is None or not self._engine.tokenizer.has_chat_template:
            raise RequestError("This model has no chat template; use `octavo complete`.")
        prompt = self._engine.tokenizer.encode_chat(messages)
        self._count += 1
        async with aclosing(self._engine.generate(prompt, self._params, f"chat-{self._count}")) as outputs:
            async for output in outputs:
                yield "".join(delta.text for delta in output.outputs)
                if output.error:
                    raise OctavoError(output.error)

    async def close(self) -> None:
        """See Partner."""
        await self._engine.close()


class RemotePartner:
    """A server that speaks the OpenAI protocol."""

    def __init__(self, options: ChatOptions, model: str | None) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        url = (options.url or "").rstrip("/").removesuffix("/v1")
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=httpx.Timeout(10, read=None))
        self._model, self._options = model, options

    async def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        """See Partner."""
        import httpx

        try:
            body: dict[str, Any] = {"model": await self._name(), "messages": messages, "stream": True}
            for name in ("max_tokens", "temperature"):
                if getattr(self._options, name) is not None:
                    body[name] = getattr(self._options, name)
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise OctavoError(_error_text(response.status_code, await response.aread()))
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            raise OctavoError(chunk["error"].get("message"))
                        yield "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        except httpx.HTTPError as error:
            raise OctavoError(f"{self._http.base_url} cannot be reached or broke off: {error!r}.") from error

    async def _name(self) -> str:
        if self._model is None:
            response = await self._http.get("/v1/models")
            if response.status_code != 200:
                raise OctavoError(_error_text(response.status_code, response.content))
            self._model = response.json()["data"][0]["id"]
        return self._model

    async def close(self) -> None:
        """See Partner."""
        await self._http.aclose()


def _error_text(status: int, body: bytes) -> str:
    try:
        return f"The server says: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"The server answered with HTTP {status}."


async def _start(config: EngineConfig) -> AsyncEngine:
    with closing(StartProgress()) as progress:
        return await AsyncEngine.start(config, on_progress=progress)


async def _say(pieces: AsyncGenerator[str, None]) -> tuple[str, bool]:
    """Prints pieces as they come. Returns the text, and whether Ctrl-C stopped it."""
    task = asyncio.current_task()
    assert task is not None
    loop, text = asyncio.get_running_loop(), ""
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                text += piece
                print(piece, end="", flush=True)
        return text, False
    except asyncio.CancelledError:
        return text, True
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def chat(config: EngineConfig, options: ChatOptions, ask: Callable[[str], str] = input) -> None:
    """Chats until the end of the input.

    Args:
        config: the engine; with a URL only its model counts.
        options: what the chat is like.
        ask: reads a line after showing a prompt; EOFError ends.

    Raises:
        OctavoError: there is nobody to chat with.
    """
    if options.url is not None and replace(config, model=None) != EngineConfig():
        raise ConfigError("With --url the server has its own engine; leave the engine's options out.")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() line editing and history
    loop = asyncio.new_event_loop()
    partner: Partner
    try:
        if options.url is not None:
            partner = RemotePartner(options, config.model)
        else:
            partner = LocalPartner(loop.run_until_complete(_start(config)), options)
        try:
            _converse(loop, partner, options.system, ask)
        finally:
            loop.run_until_complete(partner.close())
    finally:
        loop.close()


def _converse(loop: asyncio.AbstractEventLoop, partner: Partner, system: str | None, ask: Callable[[str], str]) -> None:
    messages: Messages = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = ask("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nCtrl-D ends the chat.")
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            text, stopped = loop.run_until_complete(_say(partner.answer(messages)))
        except OctavoError as error:
            # The chat goes on: an answer that failed is as if it had not been asked for.
            messages.pop()
            print(f"\noctavo: {error}", file=sys.stderr)
            continue
        print(" [stopped]" if stopped else "")
        messages.append({"role": "assistant", "content": text})


def complete(config: EngineConfig, prompt: str, max_tokens: int, temperature: float | None, seed: int | None) -> None:
    """Prints the continuation of a prompt as it is made.

    Raises:
        OctavoError: the engine cannot start, or refuses the prompt.
    """

    async def run() -> bool:
        engine = await _start(config)
        try:
            params = _params(engine.generation_defaults, max_tokens=max_tokens, temperature=temperature, seed=seed)
            _, stopped = await _say(_texts(engine, prompt, params))
            return stopped
        finally:
            await engine.close()

    stopped = asyncio.run(run())
    print()
    if stopped:
        sys.exit(128 + signal.SIGINT)


async def _texts(engine: AsyncEngine, prompt: str, params: SamplingParams) -> AsyncGenerator[str, None]:
    async with aclosing(engine.generate(prompt, params, "complete")) as outputs:
        async for output in outputs:
            yield "".join(delta.text for delta in output.outputs)
            if output.error:
                raise OctavoError(output.error)
