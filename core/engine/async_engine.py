"""AsyncEngine: the engine in a process of its own, for callers in an event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ..config import EngineConfig
from ..errors import EngineDeadError, OctavoError, RequestError, UnavailableError
from ..sampling.params import SamplingParams
from ..tokenizer import Tokenizer
from .frontend import Frontend, open_frontend
from .input import InputProcessor
from .messages import Command, Event, Log, Outputs, Progress, Ready, Shutdown, Work
from .output import OutputProcessor, RequestOutput
from .process import BUILDER, EngineProcess
from .stream import DeltaStream
from .types import EngineInfo, EngineRequest, EngineStats

LONG_TEXT = 2000  # characters; tokenizing more than this takes longer than the way to a thread and back
LAST_WORDS = 0.5  # seconds to wait for the messages of a process that has ended
CLOSE_WITHIN = 10.0  # seconds for the process to end when told to


class AsyncEngine:
    """An engine in its own process; make one with `start`. All methods belong to the event loop that started it.

    Attributes:
        config: as given.
        info: what the engine is.
        tokenizer: the model's, None where it has none.
        generation_defaults: SamplingParams fields that the model's makers recommend.
        stats: the engine's counters, as it last told them.
        is_dead: whether the engine has broken. Every request then fails with EngineDeadError.
    """

    def __init__(
        self,
        config: EngineConfig,
        frontend: Frontend,
        process: EngineProcess,
        on_progress: Callable[[str, int, int], None] | None,
        on_log: Callable[[str], None] | None,
    ) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = frontend.tokenizer
        self.generation_defaults: dict[str, Any] = frontend.generation_defaults
        self.stats = EngineStats()
        self.info: EngineInfo
        self._process = process
        self._on_progress, self._on_log = on_progress, on_log
        self._context = zmq.asyncio.Context()
        # Not an asyncio socket: without a high-water mark, and on the connecting side, sending never waits.
        self._commands = zmq.Socket(self._context, zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        for socket in (self._commands, self._events):
            socket.set_hwm(0)
            socket.linger = 0
        self._commands.connect(process.commands_address)
        self._events.bind(process.events_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._outputs = OutputProcessor(frontend.tokenizer)
        self._threads = ThreadPoolExecutor(2, "octavo-tokenize")
        self._numbers = itertools.count()
        self._streams: dict[str, DeltaStream] = {}  # by the id in the engine
        self._engine_ids: dict[str, str] = {}  # request_id -> the id in the engine
        self._outbox = Work([], [])
        self._idle = asyncio.Event()  # no generator is under way
        self._idle.set()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.Task[None] | None = None
        self._cause: str | None = None  # why it is dead
        self._draining = self._closed = False

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        on_progress: Callable[[str, int, int], None] | None = None,
        on_log: Callable[[str], None] | None = None,
        builder: str = BUILDER,
        open_frontend: Callable[[EngineConfig], Frontend] = open_frontend,
    ) -> AsyncEngine:
        """Starts the process and waits until it is ready.

        Args:
            config: the engine's configuration.
            on_progress: called with (phase, done, total) while the engine is built.
            on_log: called with each line that the engine logs.
            builder: "module:function" that the process makes its EngineCore with.
            open_frontend: finds the tokenizer.

        Raises:
            OctavoError: whatever kept the engine from starting.
        """
        # First, so that a model that does not exist is told before a process starts, and downloads happen once.
        frontend = await asyncio.to_thread(open_frontend, config)
        process = EngineProcess(config, builder)
        engine = cls(config, frontend, process, on_progress, on_log)
        try:
            process.start()
            engine._watch_process()
            engine._reader = asyncio.create_task(engine._read(), name="octavo-engine-reader")
            await engine._ready
        except BaseException:
            engine._release()
            raise
        return engine

    @property
    def is_dead(self) -> bool:
        return self._cause is not None

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because of `drain` or `close`."""
        return self._draining

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields what is new, until a delta is `finished`. Deltas that nobody fetched in time arrive as one.

        Closing or cancelling it aborts the request.

        Args:
            prompt: text, or token ids.
            params: how to sample.
            request_id: unique among the requests under way.
            priority: lower runs earlier.
            cache_salt: requests share cached prefixes only with requests of the same salt.
            add_special_tokens: whether a text gets the tokens that its model expects around it. Off for text that
                a chat template made.

        Raises:
            RequestError: the request is invalid; from the first step on.
            UnavailableError: the engine takes no new requests.
            OctavoError: none of these, for this request alone: a bug of the engine.
            EngineDeadError: the engine has broken, before or during the request.
        """
        self._check_open()
        if request_id in self._engine_ids:
            raise RequestError(f"A request with id {request_id!r} is under way already; use another.", "request_id")
        # The engine may still speak of an aborted request when its id comes again, so there each gets its own.
        engine_id = f"{request_id}#{next(self._numbers)}"
        self._engine_ids[request_id] = engine_id
        stream = self._streams[engine_id] = DeltaStream()
        self._idle.clear()
        try:
            text = prompt if isinstance(prompt, str) else None
            tokens = await self._encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
            request = self._inputs.build(engine_id, tokens, params, priority, cache_salt)
            self._submit(request, text, request_id)
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._leave(engine_id, request_id)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its generator yields what there is, with finish_reason "abort". Unknown ids are ignored."""
        engine_id = self._engine_ids.get(request_id)
        if engine_id is None:
            return
        if engine_id in self._outputs:
            self._send_abort(engine_id)
        else:
            self._streams[engine_id].aborted = True  # before it was submitted

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuses new requests from now on and waits for those under way, at most `timeout` seconds.

        Returns whether all are done. An engine that is dead has none.
        """
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends the process. Requests under way fail with EngineDeadError; drain first to let them finish."""
        if self._closed:
            return
        self._closed = self._draining = True
        self._fail_all("The engine was closed.")
        if not self.is_dead:
            self._send(Shutdown())
            await asyncio.to_thread(self._process.join, CLOSE_WITHIN)
        self._release()

    # Requests

    def _check_open(self) -> None:
        if self._cause is not None:
            raise EngineDeadError(self._cause)
        if self._draining:
            raise UnavailableError("The engine is shutting down and takes no new requests; send it to another server.")

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= LONG_TEXT:
            return self._inputs.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._inputs.encode, text, add_special_tokens)

    def _submit(self, request: EngineRequest, text: str | None, request_id: str) -> None:
        if self._cause is not None or self._closed:  # while the prompt was tokenized; a drain waits for it
            raise EngineDeadError(self._cause or "The engine was closed.")
        self._outputs.add(request.request_id, text, request.prompt_token_ids, request.params, request_id)
        self._schedule_send()
        self._outbox.add.append(request)
        if self._streams[request.request_id].aborted:
            self._send_abort(request.request_id)

    def _leave(self, engine_id: str, request_id: str) -> None:
        """Cleans up after a generator, however it ended."""
        if self._outputs.discard(engine_id) and not self._closed and not self.is_dead:
            self._send_abort(engine_id)
        del self._streams[engine_id]
        del self._engine_ids[request_id]
        if not self._engine_ids:
            self._idle.set()

    # To the engine

    def _send_abort(self, engine_id: str) -> None:
        self._schedule_send()
        self._outbox.abort.append(engine_id)

    def _schedule_send(self) -> None:
        """What one round of the event loop adds and aborts goes out as one message."""
        if not self._outbox.add and not self._outbox.abort:
            asyncio.get_running_loop().call_soon(self._flush_outbox)

    def _flush_outbox(self) -> None:
        work, self._outbox = self._outbox, Work([], [])
        if not self._closed:
            self._send(work)

    def _send(self, command: Command) -> None:
        self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    # From the engine

    async def _read(self) -> None:
        """Takes the engine's events until it dies or this task is cancelled."""
        try:
            while True:
                self._take(self._decoder.decode(await self._events.recv()))
                await asyncio.sleep(0)  # a message that is there already does not yield to the requests' consumers
        except Exception as error:  # a fault on this side; unless it is told, the requests wait for ever
            self._die(EngineDeadError(f"The engine's outputs could not be handled, which is a bug: {error!r}"))
            raise

    def _take(self, event: Event) -> None:
        if isinstance(event, Outputs):
            self._take_outputs(event)
        elif isinstance(event, Progress):
            if self._on_progress:
                self._on_progress(event.phase, event.done, event.total)
        elif isinstance(event, Log):
            if self._on_log:
                self._on_log(event.line)
        elif isinstance(event, Ready):
            self.info = event.info
            self._inputs = InputProcessor(event.info, self.tokenizer)
            self._ready.set_result(None)
        else:
            self._die(event.failure.exception(EngineDeadError))

    def _take_outputs(self, event: Outputs) -> None:
        self.stats = event.stats
        for engine_id, failure in event.refused:
            self._outputs.discard(engine_id)
            stream = self._streams.get(engine_id)
            if stream is not None:
                stream.fail(failure.exception(OctavoError))
        deltas, aborts = self._outputs.process(event.outputs)
        for engine_id, delta in deltas.items():
            self._streams[engine_id].put(delta)
        for engine_id in aborts:
            self._send_abort(engine_id)

    def _watch_process(self) -> None:
        """Arranges that the end of the process is noticed, after what it said last."""
        loop, sentinel = asyncio.get_running_loop(), self._process.sentinel

        def ended() -> None:
            loop.remove_reader(sentinel)
            loop.call_later(LAST_WORDS, self._process_ended)

        loop.add_reader(sentinel, ended)

    def _process_ended(self) -> None:
        if not self._closed:
            self._die(EngineDeadError(f"The engine's process {self._process.how_it_ended()}."))

    def _die(self, error: OctavoError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        elif self._cause is None:
            self._cause = f"{error} No request can be served until the server is started again."
            self._fail_all(self._cause)

    def _fail_all(self, cause: str) -> None:
        for engine_id, stream in self._streams.items():
            if self._outputs.discard(engine_id):
                stream.fail(EngineDeadError(cause))

    def _release(self) -> None:
        """Lets go of the process, sockets and threads. Idempotent."""
        if self._reader is not None:
            self._reader.cancel()
        if self._process.pid is not None:
            asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.kill()
        self._commands.close()
        self._events.close()
        self._context.term()
        self._threads.shutdown(wait=False)
