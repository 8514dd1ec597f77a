"""What the caller sees: text, token ids and reasons, made of what the engine puts out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..sampling.params import SamplingParams
from ..tokenizer import DetokenizeStream, Tokenizer
from .stop import StopMatcher
from .types import EngineOutput, FinishReason, TokenLogprobs


@dataclass
class CompletionOutput:
    """One completion of a request: what is new in a delta, everything in a merged output.

    Attributes:
        index: which of the request's n completions.
        text: the text; "" where detokenize is off. Neither an end-of-sequence nor a stop token is part of it.
        token_ids: the tokens; one that ended the output is among them. Their number is the usage.
        logprobs: one for each of token_ids, where asked for, else None.
        finish_reason: "stop", "length", "abort" or "error"; None goes on.
        stop_reason: the stop string or the stop token id that ended it; None for end-of-sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def merge(self, delta: CompletionOutput) -> None:
        """Appends a later delta of the same completion."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = delta.logprobs if self.logprobs is None else self.logprobs + delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class RequestOutput:
    """A request's output: a delta when streamed, everything when merged.

    Attributes:
        request_id: as the caller named it.
        prompt: the prompt's text, None where token ids were given.
        prompt_token_ids: the prompt.
        outputs: the completions that have something new (merged: all of them), by index.
        prompt_logprobs: one for each prompt token but the first, where asked for; in a stream, in one delta only.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        finished: whether all completions are finished; nothing follows.
        error: what happened where a completion finished with "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    error: str | None = None

    def merge(self, delta: RequestOutput) -> None:
        """Appends a later delta of the same request."""
        mine = {output.index: output for output in self.outputs}
        for output in delta.outputs:
            if output.index in mine:
                mine[output.index].merge(output)
            else:
                self.outputs.append(output)
                self.outputs.sort(key=lambda o: o.index)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.num_cached_tokens = delta.num_cached_tokens
        self.finished = delta.finished
        self.error = delta.error or self.error


class Processed(NamedTuple):
    """What `OutputProcessor.process` made of a batch.

    Attributes:
        outputs: deltas of the requests that have something new, by their ids in the engine.
        aborts: requests that are finished here (by a stop string, or by an error of one completion) while the
            engine still works on them: it is to be told to abort them.
    """

    outputs: dict[str, RequestOutput]
    aborts: list[str]


class OutputProcessor:
    """Turns engine outputs into deltas of text for the requests under way.

    Args:
        tokenizer: the model's; None where there is none (then only requests with detokenize=False are taken).
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _RequestState] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._requests

    def add(
        self,
        engine_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str | None = None,
    ) -> None:
        """Registers a request before it is given to the engine.

        Args:
            engine_id: its id in the engine.
            prompt: its text, None where token ids were given.
            prompt_token_ids: the prompt.
            params: how it is sampled.
            request_id: its id in the outputs, where that is another one.
        """
        head = RequestOutput(request_id or engine_id, prompt, prompt_token_ids)
        self._requests[engine_id] = _RequestState(head, params, self._tokenizer)

    def discard(self, engine_id: str) -> bool:
        """Forgets a request; what the engine still says about it is ignored. Returns whether it was known."""
        return self._requests.pop(engine_id, None) is not None

    def discard_all(self) -> list[str]:
        """Forgets all requests; returns their ids."""
        known = list(self._requests)
        self._requests.clear()
        return known

    def process(self, outputs: Iterable[EngineOutput]) -> Processed:
        """Takes what one or more steps put out. Outputs of unknown or finished requests are ignored."""
        deltas: dict[str, RequestOutput] = {}
        aborts: list[str] = []
        for output in outputs:
            state = self._requests.get(output.request_id)
            if state is None:
                continue
            completion = state.advance(output)
            delta = deltas.get(output.request_id)
            if delta is None:
                if completion is None and output.prompt_logprobs is None and output.finish_reason != "error":
                    continue
                delta = deltas[output.request_id] = state.delta()
            if output.prompt_logprobs is not None:
                delta.prompt_logprobs = output.prompt_logprobs
            delta.error = delta.error or output.error
            if completion is not None:
                _append(delta, completion)
            if output.finish_reason == "error":
                for rest in state.fail_rest():
                    _append(delta, rest)
            if not state.open:
                delta.finished = True
                del self._requests[output.request_id]
                if not state.ended_by_engine:
                    aborts.append(output.request_id)
        return Processed(deltas, aborts)


def _append(delta: RequestOutput, completion: CompletionOutput) -> None:
    """Adds a completion's delta to its request's; a batch may hold several of the same completion."""
    for known in delta.outputs:
        if known.index == completion.index:
            known.merge(completion)
            return
    delta.outputs.append(completion)


class _RequestState:
    """A request under way.

    Attributes:
        open: completions that are not finished.
        ended_by_engine: whether the engine knows of every completion's end.
    """

    def __init__(self, head: RequestOutput, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._head = head
        self._texts = [_CompletionText(params, tokenizer) for _ in range(params.n)]
        self._finished = [False] * params.n
        self._cached = 0
        self._in_engine = params.n
        self.open = params.n

    @property
    def ended_by_engine(self) -> bool:
        return self._in_engine == 0

    def delta(self) -> RequestOutput:
        """An empty delta of this request."""
        head = self._head
        return RequestOutput(head.request_id, head.prompt, head.prompt_token_ids, num_cached_tokens=self._cached)

    def advance(self, output: EngineOutput) -> CompletionOutput | None:
        """The delta that an engine output means; None for a completion that is finished already."""
        self._cached = max(self._cached, output.num_cached_tokens)
        if output.finish_reason is not None:
            self._in_engine -= 1
        if self._finished[output.index]:
            return None
        completion = self._texts[output.index].advance(output)
        if completion.finish_reason is not None:
            self._finished[output.index] = True
            self.open -= 1
        return completion

    def fail_rest(self) -> list[CompletionOutput]:
        """Finishes what is open, because a completion of the request failed."""
        rest = [CompletionOutput(i, finish_reason="error") for i, done in enumerate(self._finished) if not done]
        self._finished = [True] * len(self._finished)
        self.open = 0
        return rest


class _CompletionText:
    """Text and stop strings of one completion."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._stream: DetokenizeStream | None = None
        if params.detokenize and tokenizer is not None:
            self._stream = tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._count = 0

    def advance(self, output: EngineOutput) -> CompletionOutput:
        """The delta of an output: its text and tokens up to the first stop string, if that is in it."""
        delta = CompletionOutput(
            output.index, "", output.token_ids, output.logprobs, output.finish_reason, output.stop_token
        )
        if self._stream is None:
            return delta
        # The token that ended the output is not text, whether it is a special token or not.
        ender = output.finish_reason == "stop" and bool(output.token_ids)
        pieces = []
        for position, token in enumerate(output.token_ids[:-1] if ender else output.token_ids, 1):
            self._count += 1
            text, stop = self._feed(self._stream.step(token))
            pieces.append(text)
            if stop is not None:
                delta.token_ids = output.token_ids[:position]
                delta.logprobs = output.logprobs[:position] if output.logprobs is not None else None
                delta.finish_reason, delta.stop_reason = "stop", stop
                break
        else:
            if output.finish_reason is not None:
                text, stop = self._feed(self._stream.flush())
                pieces.append(text)
                if stop is not None:
                    delta.finish_reason, delta.stop_reason = "stop", stop
                elif self._matcher is not None:
                    pieces.append(self._matcher.flush())
        delta.text = "".join(pieces)
        return delta

    def _feed(self, text: str) -> tuple[str, str | None]:
        if self._matcher is None:
            return text, None
        return self._matcher.feed(text, armed=self._count >= self._min_tokens)
