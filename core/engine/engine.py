"""The engine: takes requests, runs steps on a backend, gives back tokens. Single-threaded and synchronous."""

from __future__ import annotations

import secrets
from collections import deque
from typing import Any

import numpy as np

from ..backend import StepConstraints, StepLimits
from ..errors import EngineDeadError, RequestError, UnavailableError
from ..executor.executor import Executor
from ..sampling.adjust import Adjustments
from ..sampling.params import SamplingParams
from ..sampling.rng import child_seed
from ..step import SamplerShape, StepOutput
from .batch import Batch, BatchBuilder
from .block_manager import BlockManager
from .scheduler import Scheduler
from .sequence import Sequence, Status
from .types import EngineInfo, EngineOutput, EngineRequest, EngineStats, FinishReason, TokenLogprobs

_MAX_FAILURES = 3  # failed steps in a row after which the device is taken to be lost


class EngineCore:
    """Continuous batching over one backend.

    Args:
        backend: with the model loaded, the cache allocated and warmed up.
        info: what the engine is.
        limits: bounds; `info` says the same.
        constraints: what the backend takes.
        num_blocks: KV blocks allocated, the null block included.
        num_host_blocks: host blocks allocated.
        prefix_caching, chunked_prefill: as in EngineConfig.
        seed: for requests that bring none; None draws fresh ones.
        max_waiting: sequences that may wait.
    """

    def __init__(
        self,
        backend: Executor,
        info: EngineInfo,
        limits: StepLimits,
        constraints: StepConstraints,
        num_blocks: int,
        num_host_blocks: int = 0,
        prefix_caching: bool = True,
        chunked_prefill: bool = True,
        seed: int | None = None,
        max_waiting: int = 100_000,
    ) -> None:
        self.backend = backend
        self.info = info
        self._limits = limits
        self._constraints = constraints
        self._seed = seed
        self._max_waiting = max_waiting
        self.scheduler = Scheduler(
            limits,
            constraints,
            BlockManager(num_blocks, prefix_caching),
            num_host_blocks,
            info.eos_token_ids,
            chunked_prefill,
            backend.model.freeable_window,
        )
        self._builder = BatchBuilder(limits, constraints, self.scheduler.table)
        self._in_flight: deque[tuple[Batch, Any]] = deque()
        self._requests: dict[str, list[Sequence]] = {}
        self._outputs: list[EngineOutput] = []  # of aborts and failures, given out by the next step
        self._arrivals = 0
        self._failures = 0

    # ---------------------------------------------------------------------------------------- requests

    @property
    def has_work(self) -> bool:
        """Whether `step` would have something to do or to give out."""
        return bool(self._in_flight or self._outputs) or self.scheduler.has_work

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
            RequestError: it is invalid, too long, or asks for what the device cannot do.
            UnavailableError: the queue is full.
        """
        params = request.params
        self._check(request)
        most = self.info.max_model_len - len(request.prompt_token_ids)
        limit = len(request.prompt_token_ids) + min(most, params.max_tokens or most)
        seed = params.seed
        if seed is None:
            seed = secrets.randbits(63) if self._seed is None else child_seed(self._seed, self._arrivals + 1)
        sequences = []
        for index in range(params.n):
            adjustments = self._adjustments(request)
            sequences.append(Sequence(request, index, self._arrivals, limit, child_seed(seed, index), adjustments))
            self._arrivals += 1
        self._requests[request.request_id] = sequences
        self.scheduler.add(sequences[0], sequences[1:])

    def abort(self, request_id: str) -> None:
        """Ends a request; the next step's outputs say "abort" for its unfinished completions. Idempotent."""
        for seq in self._requests.pop(request_id, ()):
            if seq.status is not Status.FINISHED:
                self._finish(seq, "abort")

    def _check(self, request: EngineRequest) -> None:
        params, prompt = request.params, request.prompt_token_ids
        if request.request_id in self._requests:
            raise RequestError(f"A request with the id {request.request_id!r} is under way.", "request_id")
        if not prompt:
            raise RequestError("The prompt is empty: give at least one token.", "prompt")
        if len(prompt) >= self.info.max_model_len:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens; with at least one token of output the longest is "
                f"{self.info.max_model_len - 1} (context length {self.info.max_model_len}). Shorten the prompt.",
                "prompt",
            )
        if min(prompt) < 0 or max(prompt) >= self.info.vocab_size:
            raise RequestError(f"The prompt has token ids outside 0 to {self.info.vocab_size - 1}.", "prompt")
        params.check_vocabulary(self.info.vocab_size)
        self._check_sampler(request)
        if self.scheduler.num_waiting + params.n > self._max_waiting:
            raise UnavailableError(f"The queue is full ({self._max_waiting} requests wait). Try again later.")

    def _check_sampler(self, request: EngineRequest) -> None:
        """Refuses what no compiled sampler of the device covers, rather than leave it out."""
        if self._constraints.samplers is None:
            return
        params = request.params
        adjustments = self._adjustments(request)
        wanted = max(-1 if n is None else n for n in (params.logprobs, params.prompt_logprobs))
        need = SamplerShape(
            greedy=params.greedy,
            filters=not params.greedy and bool(params.top_k or params.top_p < 1.0 or params.min_p),
            adjust=adjustments.max_entries(self.info.max_model_len) if adjustments else 0,
            logprobs=wanted,
        )
        if not any(shape.covers(need) for shape in self._constraints.samplers):
            raise RequestError(
                f"This device's compiled samplers do not cover the request (it needs {need}; "
                f"they are {list(self._constraints.samplers)}). Ask for fewer logprobs, penalties or biased tokens."
            )

    def _adjustments(self, request: EngineRequest) -> Adjustments | None:
        made = Adjustments(request.params, request.prompt_token_ids, self.info.eos_token_ids, self.info.vocab_size)
        return made if made.active else None

    # ------------------------------------------------------------------------------------------- steps

    def step(self) -> list[EngineOutput]:
        """Launches what can be launched, waits for the oldest step and returns what it gave.

        Raises:
            EngineDeadError: a host is lost, so no step can run any more.
            Exception: what the backend raised, when several steps in a row failed; before that, a failed step
                ends its own requests with "error" and the engine goes on.
        """
        while len(self._in_flight) < self._constraints.max_in_flight:
            batch = self.scheduler.schedule(len(self._in_flight))
            if batch is None:
                break
            try:
                self._in_flight.append((batch, self._submit(batch)))
            except Exception as error:
                self._collect_all()
                self._fail(batch, error)
        if self._in_flight:
            self._collect()
        elif self.scheduler.has_work and not self._outputs:
            raise RuntimeError("the scheduler has sequences but found nothing to run")
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> EngineStats:
        """Counters and gauges as they are now."""
        stats = self.scheduler.snapshot()
        stats.late_compiles = self.backend.late_compiles.count
        return stats

    def check(self) -> None:
        """For the time between requests: raises EngineDeadError where the device was lost meanwhile."""
        self.backend.check()

    def close(self) -> None:
        """Drops all requests and frees the device."""
        self._in_flight.clear()
        self._requests.clear()
        self.backend.close()

    def _collect(self) -> None:
        batch, handle = self._in_flight.popleft()
        try:
            output = self.backend.collect(handle)
        except Exception as error:
            self._fail(batch, error)
        else:
            self._failures = 0
            self._take(batch, output)

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect()

    def _submit(self, batch: Batch) -> Any:
        for kind, source, target in batch.transfers:
            move = {"copy": self.backend.copy_blocks, "out": self.backend.swap_out, "in": self.backend.swap_in}[kind]
            move(np.asarray(source, np.int32), np.asarray(target, np.int32))
        return self.backend.submit(self._builder.build(batch))

    def _fail(self, batch: Batch, error: Exception) -> None:
        """Ends the requests of a failed step; all others are computed again, as nobody knows what the cache holds."""
        self._failures += 1
        if self._failures >= _MAX_FAILURES or isinstance(error, EngineDeadError):
            raise error
        text = f"The step failed on the device: {type(error).__name__}: {error}"
        lost = [batch, *(later for later, _ in self._in_flight)]
        self._in_flight.clear()
        for request_id in {seq.request.request_id for one in lost for seq in one.sequences}:
            for seq in self._requests.pop(request_id, ()):
                if seq.status is not Status.FINISHED:
                    self._finish(seq, "error", text)
        self.scheduler.recompute_all()

    def _finish(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> None:
        self.scheduler.finish(seq)
        self._outputs.append(EngineOutput(seq.request.request_id, seq.index, [], reason, error=error))

    # ---------------------------------------------------------------------------------------- results

    def _take(self, batch: Batch, output: StepOutput) -> None:
        """Books the sampled tokens: stop checks, prefix cache, outputs."""
        for seq, row, count in batch.target_rows:
            if seq.status is Status.RUNNING and seq.prompt_logprobs is not None:
                wanted = seq.request.params.prompt_logprobs or 0
                seq.prompt_logprobs += [_logprobs(output, r, wanted) for r in range(row, row + count)]
        seqs, slots, positions = batch.row_seqs, batch.row_slots, batch.row_positions
        tokens = output.tokens[: len(seqs)]
        live = [seq.status is Status.RUNNING for seq in seqs]
        if not all(live):  # finished or aborted while the step ran
            rows = np.flatnonzero(live)
            seqs = [seqs[r] for r in rows.tolist()]
            slots, positions, tokens = slots[rows], positions[rows], tokens[rows]
        else:
            rows = None
        t = self.scheduler.table
        t.pending[slots] -= 1
        t.last_token[slots] = tokens
        length = positions + 2
        stopped = (t.stop_ids[slots] == tokens[:, None]).any(axis=1) & (length > t.stop_from[slots])
        ended = stopped | (length >= t.limit[slots])

        first = len(self._outputs)
        append = self._outputs.append
        for seq, token in zip(seqs, tokens.tolist(), strict=True):
            seq.tokens.append(token)
            append(EngineOutput(seq.request.request_id, seq.index, [token]))
        self.scheduler.stats.generated_tokens += len(seqs)
        for i in np.flatnonzero(t.adjust[slots]).tolist():
            seqs[i].adjustments.observe(int(tokens[i]))
        for i in np.flatnonzero(t.logprobs[slots] >= 0).tolist():
            row = i if rows is None else int(rows[i])
            self._outputs[first + i].logprobs = [_logprobs(output, row, int(t.logprobs[slots[i]]))]
        for i in np.flatnonzero(length == t.first_length[slots]).tolist():
            out, seq = self._outputs[first + i], seqs[i]
            out.num_cached_tokens, out.prompt_logprobs = seq.num_cached, seq.prompt_logprobs
        for i in np.flatnonzero((positions + 1) % self._limits.block_size == 0).tolist():
            self.scheduler.publish(seqs[i], int(positions[i]) + 1)
        for i in np.flatnonzero(ended).tolist():
            self._end(seqs[i], self._outputs[first + i], bool(stopped[i]), int(tokens[i]))

    def _end(self, seq: Sequence, out: EngineOutput, stopped: bool, token: int) -> None:
        params: SamplingParams = seq.request.params
        out.finish_reason = "stop" if stopped else "length"
        if stopped and token in params.stop_token_ids:
            out.stop_token = token
        self.scheduler.finish(seq)
        others = self._requests[seq.request.request_id]
        if all(s.status is Status.FINISHED for s in others):
            del self._requests[seq.request.request_id]


def _logprobs(output: StepOutput, row: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(
        int(output.tokens[row]),
        float(output.logprobs[row]),
        int(output.ranks[row]),
        output.top_ids[row, :top].tolist(),
        output.top_logprobs[row, :top].tolist(),
    )
