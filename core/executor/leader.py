"""Rank 0: each call goes to the followers first and then to this host's own backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from ..backend import Backend, Capabilities, Hosts, MemoryPlan, StepConstraints, StepLimits
from ..engine.messages import Failure
from ..errors import EngineDeadError, OctavoError
from ..late import LateCompiles
from ..models.spec import ModelSpec
from ..models.weights import WeightSource
from ..step import Step, StepOutput, StepShape
from .channel import Followers
from .messages import Array, Bye, Call, Done, Failed, InitCache, Load, Move, PlanMemory, Stop, Submit, Warmup
from .worker import Worker

OTHER_CAUSE = 3.0  # seconds to learn whether a call failed here because another host did
CLOSE_WITHIN = 5.0  # seconds for followers, and then for this host, to close


class _Event(NamedTuple):
    """What the waiting thread is told: a job's end here, a follower's message, or the loss of one."""

    job: int | None = None
    result: Any = None
    error: BaseException | None = None
    rank: int | None = None
    message: Any = None
    lost: str = ""


class Leader:
    """Several hosts as one executor. All methods belong to one thread.

    Once a call has failed, or a follower is lost, nothing is known of what the devices wait for: every call raises
    EngineDeadError from then on, and the followers are told to end.

    Args:
        hosts: with rank 0.
        facts: what the followers must have equal.
        create: makes this host's backend, once all hosts are there; it may wait for theirs.
        log: is told whom it waits for.

    Raises:
        ConfigError: a follower has another model or other options, or the port cannot be had.
        EngineDeadError: a follower did not come, or was lost.
        OctavoError: what `create` raised, here or on a follower.
    """

    model: ModelSpec

    def __init__(
        self, hosts: Hosts, facts: dict[str, Any], create: Callable[[], Backend], log: Callable[[str], None]
    ) -> None:
        self._ranks = set(range(1, hosts.count))
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._jobs = 0
        self._failed: OctavoError | None = None
        self._closed = False
        self._followers = Followers(hosts.coordinator, hosts.count)
        try:
            self._followers.gather(facts, log)
        except BaseException:
            self._followers.close()
            raise
        self._followers.listen(
            lambda rank, message: self._events.put(_Event(rank=rank, message=message)),
            lambda text: self._events.put(_Event(lost=text)),
        )
        self._worker = Worker(lambda job, result, error: self._events.put(_Event(job, result, error)))
        try:
            self._local: Backend = self._run(create, start=True)
        except BaseException:
            self.close()
            raise

    # What needs no other host

    @property
    def late_compiles(self) -> LateCompiles:
        """Those of this host; the others run the same programs."""
        return self._local.late_compiles

    def capabilities(self) -> Capabilities:
        return self._local.capabilities()

    def constraints(self, model: ModelSpec, limits: StepLimits) -> StepConstraints:
        return self._local.constraints(model, limits)

    def dtype(self, model: ModelSpec) -> str:
        return self._local.dtype(model)

    def kv_dtype(self, model: ModelSpec) -> str:
        return self._local.kv_dtype(model)

    # The start: all hosts answer

    def memory(self, model: ModelSpec, limits: StepLimits) -> MemoryPlan:
        """Each host takes the others to be like itself; what all of them have is the least that one says."""
        plan, others = self._together(PlanMemory(limits), lambda: self._local.memory(model, limits))
        plans = [plan, *others]
        return replace(plan, total=min(p.total for p in plans), available=min(p.available for p in plans))

    def load(self, model: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        self._together(Load(), lambda: self._local.load(model, weights, progress))
        self.model = self._local.model

    def init_cache(self, limits: StepLimits, num_blocks: int, num_host_blocks: int = 0) -> None:
        call = InitCache(limits, num_blocks, num_host_blocks)
        self._together(call, lambda: self._local.init_cache(limits, num_blocks, num_host_blocks))

    def warmup(self, shapes: Sequence[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        self._together(Warmup(list(shapes)), lambda: self._local.warmup(shapes, progress))

    # Steps: nobody answers; a follower that fails says so

    def submit(self, step: Step) -> Any:
        self._send(Submit.of(step))
        return self._run(lambda: self._local.submit(step))

    def collect(self, handle: Any) -> StepOutput:
        return self._run(lambda: self._local.collect(handle))

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        self._send(Move("copy_blocks", Array.of(source), Array.of(target)))
        self._run(lambda: self._local.copy_blocks(source, target))

    def swap_out(self, blocks: np.ndarray, host_blocks: np.ndarray) -> None:
        self._send(Move("swap_out", Array.of(blocks), Array.of(host_blocks)))
        self._run(lambda: self._local.swap_out(blocks, host_blocks))

    def swap_in(self, host_blocks: np.ndarray, blocks: np.ndarray) -> None:
        self._send(Move("swap_in", Array.of(host_blocks), Array.of(blocks)))
        self._run(lambda: self._local.swap_in(host_blocks, blocks))

    def check(self) -> None:
        """Raises EngineDeadError where a follower has failed or is lost."""
        self._check()
        while not self._events.empty():
            if (error := self._trouble(self._events.get(), start=False)) is not None:
                raise self._fail(error)

    def close(self, reason: str = "") -> None:
        """Ends the followers, in order where nothing has failed, and frees the device. Idempotent.

        Args:
            reason: why there will be no engine, told to the followers; "" for an orderly end.
        """
        if self._closed:
            return
        self._closed = True
        if self._failed is None:
            self._followers.send(Stop(reason))
            if not reason:
                self._wait(lambda e: isinstance(e.message, Bye), len(self._ranks))
            if hasattr(self, "_local"):
                self._worker.start(self._next_job(), self._local.close)
                self._wait(lambda e: e.job == self._jobs, 1)
        self._worker.end()
        self._followers.close()

    # Waiting

    def _next_job(self) -> int:
        self._jobs += 1
        return self._jobs

    def _send(self, call: Call) -> None:
        self._check()
        self._followers.send(call)

    def _check(self) -> None:
        if self._failed is not None:
            raise EngineDeadError(str(self._failed)) from self._failed

    def _together(self, call: Call, job: Callable[[], Any]) -> tuple[Any, list[Any]]:
        """A call of the start: (the result here, what the followers answered)."""
        self._send(call)
        answers: list[Any] = []
        result = self._run(job, start=True, answers=answers)
        return result, answers

    def _run(self, job: Callable[[], Any], start: bool = False, answers: list[Any] | None = None) -> Any:
        """Runs a job on this host; waits for it, and where `answers` is given for all followers' answers as well.

        Raises:
            EngineDeadError: it failed, here or on a follower, or a follower is lost.
            Exception: while the engine starts, what the job raised, here or on a follower.
        """
        self._check()
        number, done, result = self._next_job(), False, None
        self._worker.start(number, job)
        while not done or (answers is not None and len(answers) < len(self._ranks)):
            event = self._events.get()
            if event.job == number and event.error is None:
                done, result = True, event.result
            elif event.job == number:
                assert event.error is not None
                raise self._fail(self._cause(event.error, start))
            elif isinstance(event.message, Done) and answers is not None:
                answers.append(event.message.plan)
            elif (error := self._trouble(event, start)) is not None:
                raise self._fail(error)
        return result

    def _cause(self, error: BaseException, start: bool) -> BaseException:
        """Why a job failed here: where another host failed at the same time, that is what broke the collective."""
        if not isinstance(error, OctavoError):
            try:
                while True:
                    event = self._events.get(timeout=OTHER_CAUSE)
                    if (other := self._trouble(event, start)) is not None:
                        return other
            except Empty:
                pass
        if start or not isinstance(error, Exception):
            return error
        return EngineDeadError(f"A step failed on rank 0 of several hosts: {type(error).__name__}: {error}")

    def _trouble(self, event: _Event, start: bool) -> OctavoError | None:
        """The error that an event from the followers means, if any."""
        if event.lost:
            return EngineDeadError(event.lost)
        if isinstance(event.message, Failed):
            text = f"Host {event.rank} failed in {event.message.during}: {event.message.failure.message}"
            if not start:
                return EngineDeadError(text)
            failure = event.message.failure
            return Failure(failure.kind, text, failure.param).exception(EngineDeadError)
        if isinstance(event.message, Bye):
            return EngineDeadError(f"Host {event.rank} has ended.")
        return None

    def _fail(self, error: BaseException) -> BaseException:
        """Breaks the group."""
        self._failed = error if isinstance(error, OctavoError) else EngineDeadError(f"{type(error).__name__}: {error}")
        self._followers.send(Stop(str(self._failed)))
        return error

    def _wait(self, wanted: Callable[[_Event], bool], count: int) -> None:
        """Waits for so many events, at most CLOSE_WITHIN seconds; a follower's loss ends it."""
        try:
            while count:
                event = self._events.get(timeout=CLOSE_WITHIN)
                if event.lost:
                    return
                count -= wanted(event)
        except Empty:
            pass
