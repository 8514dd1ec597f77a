"""A batch on its way through an engine in this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

from .engine.output import CompletionOutput, OutputProcessor, RequestOutput
from .engine.types import EngineOutput, EngineRequest
from .errors import OctavoError
from .interrupt import DeferredInterrupt

if TYPE_CHECKING:
    from .engine.engine import EngineCore


class BatchRun:
    """One batch on its way through an engine.

    Args:
        engine: the engine; nothing else uses it meanwhile.
        processor: makes the outputs; empty.
        queue: how many sequences to keep waiting in the engine.
    """

    def __init__(self, engine: EngineCore, processor: OutputProcessor, queue: int) -> None:
        self._engine = engine
        self._processor = processor
        self._queue = queue
        self._results: dict[str, RequestOutput] = {}

    def outputs(
        self, requests: Sequence[EngineRequest], texts: Sequence[str | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Runs all requests to their ends. Ctrl-C leaves none of them in the engine."""
        todo = deque(zip(requests, texts, strict=True))
        with DeferredInterrupt() as interrupt, _Bar(len(requests), use_tqdm) as bar:
            sound = True
            try:
                while todo or len(self._processor):
                    interrupt.check()
                    self._feed(todo, bar)
                    self._take(self._engine.step(), bar)
            except Exception:
                sound = False
                raise
            finally:
                if sound:
                    self._clear()
        return [self._results[request.request_id] for request in requests]

    def _feed(self, todo: deque[tuple[EngineRequest, str | None]], bar: _Bar) -> None:
        """Adds requests until enough are waiting; at least one where none is."""
        room = self._queue - self._engine.stats().num_waiting
        while todo and room > 0:
            request, text = todo.popleft()
            room -= request.params.n
            self._processor.add(request.request_id, text, request.prompt_token_ids, request.params)
            try:
                self._engine.add_request(request)
            except OctavoError as error:
                self._processor.discard(request.request_id)
                ends = [CompletionOutput(i, finish_reason="error") for i in range(request.params.n)]
                output = RequestOutput(
                    request.request_id, text, request.prompt_token_ids, ends, finished=True, error=str(error)
                )
                self._results[request.request_id] = output
                bar.finished(output)

    def _take(self, outputs: list[EngineOutput], bar: _Bar) -> None:
        deltas, aborts = self._processor.process(outputs)
        for engine_id, delta in deltas.items():
            result = self._results.setdefault(engine_id, delta)
            if result is not delta:
                result.merge(delta)
            if result.finished:
                bar.finished(result)
        for engine_id in aborts:
            self._engine.abort(engine_id)

    def _clear(self) -> None:
        """Aborts what is under way. What was aborted by a stop string at the very end leaves here, too."""
        for engine_id in self._processor.discard_all():
            self._engine.abort(engine_id)
        while self._engine.has_work:
            self._engine.step()


class _Bar:
    """Progress on stderr: prompts done, and tokens per second in and out."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, disable=not shown, desc="Generating", unit="prompt", dynamic_ncols=True)
        self._started = time.monotonic()
        self._in = self._out = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def finished(self, output: RequestOutput) -> None:
        """Counts a prompt that is done."""
        self._in += len(output.prompt_token_ids)
        self._out += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = max(time.monotonic() - self._started, 1e-6)
        text = f"in {self._in / seconds:.0f} tok/s, out {self._out / seconds:.0f} tok/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
