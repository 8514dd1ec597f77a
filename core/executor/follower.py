"""A host that is not rank 0: it makes the calls that rank 0 tells it, on its own backend, until it is told to end."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ..backend import Backend, Hosts
from ..engine.messages import Failure
from ..errors import ConfigError, EngineDeadError
from ..models.spec import ModelSpec
from ..models.weights import WeightSource
from .channel import LAST_WORDS, START_WITHIN, control_address, endpoint, set_up
from .messages import (
    Bye,
    Call,
    Done,
    Failed,
    Hello,
    InitCache,
    Load,
    Move,
    PlanMemory,
    Refused,
    Stop,
    Submit,
    ToFollower,
    ToLeader,
    Warmup,
    Welcome,
)

IDLE = 0.2  # seconds without a call after which the steps in flight are collected
END_WITHIN = 5.0  # seconds for a call under way to return once rank 0 has ended


def end_process(text: str) -> None:
    """Says why and ends this process at once: the thread with the backend may wait in a collective for ever."""
    os.write(2, f"octavo: {text}\n".encode())
    os._exit(1)


class LeaderLink:
    """A follower's end of the control channel.

    Args:
        hosts: with this host's rank.
        on_lost: called, in another thread, with a sentence when rank 0 is lost, or has ended while a call hangs here.
    """

    def __init__(self, hosts: Hosts, on_lost: Callable[[str], None] = end_process) -> None:
        self._hosts, self._on_lost = hosts, on_lost
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToFollower)
        self.calls: SimpleQueue[Call | Stop] = SimpleQueue()
        address = control_address(hosts.coordinator)
        self._where = f"{address[0]} port {address[1]}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        set_up(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._outbox, self._inbox = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._inbox.bind("inproc://answers")
        self._outbox.connect("inproc://answers")
        self._socket.connect(endpoint(address))
        self._thread: threading.Thread | None = None

    def join(self, facts: dict[str, Any], log: Callable[[str], None]) -> None:
        """Introduces this host and waits until all are there. Rank 0 may start later than this host.

        Raises:
            ConfigError: rank 0 refuses this host; it says why.
            EngineDeadError: rank 0 has ended, or did not come in time.
        """
        rank, count = self._hosts.rank, self._hosts.count
        log(f"Host {rank} of {count}: waiting for rank 0 at {self._where}.")
        self._socket.send(self._encoder.encode(Hello(rank, facts)))
        limit = time.monotonic() + START_WITHIN
        while True:
            if time.monotonic() > limit:
                raise EngineDeadError(
                    f"Host {rank}: nothing came from rank 0 at {self._where} within {START_WITHIN:.0f} s. Start it "
                    "there, see that --coordinator is its address, and that the port can be reached from here."
                )
            if not self._socket.poll(200):
                # Not reconnected: another rank 0 would not have heard the hello.
                if self._monitor.poll(0) and not self._socket.poll(0):  # what it said last comes first
                    raise EngineDeadError(f"Host {rank}: rank 0 at {self._where} has ended. Start this host again.")
                continue
            message = self._decoder.decode(self._socket.recv())
            if isinstance(message, Refused):
                raise ConfigError(message.reason)
            if isinstance(message, Stop):
                raise EngineDeadError(f"Host {rank}: rank 0 has ended: {message.reason}")
            if isinstance(message, Welcome):
                break
        log(f"Host {rank} of {count}: all hosts are there.")
        self._thread = threading.Thread(target=self._run, name="octavo-leader", daemon=True)
        self._thread.start()

    def send(self, message: ToLeader) -> None:
        """Sends to rank 0. From the thread that made this object."""
        self._outbox.send(self._encoder.encode(message))

    def _run(self) -> None:
        poller = zmq.Poller()
        for sock in (self._socket, self._inbox, self._monitor):
            poller.register(sock, zmq.POLLIN)
        stopped, reason = 0.0, ""
        while True:
            ready = dict(poller.poll(200))
            if self._inbox in ready:
                data = self._inbox.recv()
                if not data:  # the end
                    return
                self._socket.send(data)
            if self._socket in ready:
                message = self._decoder.decode(self._socket.recv())
                if isinstance(message, Stop):
                    stopped, reason = time.monotonic(), message.reason
                    self.calls.put(message)
                elif isinstance(message, Call):
                    self.calls.put(message)
            elif self._monitor in ready and not self._socket.poll(0):  # what it said last comes first
                recv_monitor_message(self._monitor)
                if not stopped:
                    self._on_lost(f"host {self._hosts.rank}: rank 0 is lost: it has ended or cannot be reached.")
                    return
            if stopped and time.monotonic() - stopped > END_WITHIN:
                self._on_lost(f"host {self._hosts.rank}: rank 0 has ended: {reason or 'it was told to'}.")
                return

    def close(self) -> None:
        """Closes the sockets, after what was sent has gone out. Idempotent."""
        if self._context.closed:
            return
        if self._thread is not None:
            self._outbox.send(b"")
            self._thread.join()
        self._socket.disable_monitor()
        for sock in (self._monitor, self._outbox, self._inbox):
            sock.close()
        self._socket.close(LAST_WORDS)
        self._context.term()


class Follower:
    """Makes rank 0's calls.

    Args:
        link: joined.
        backend: this host's.
        model, weights: what rank 0 loads, opened here.
        log: is told what happens.
    """

    def __init__(
        self,
        link: LeaderLink,
        backend: Backend,
        model: ModelSpec,
        weights: Callable[[], WeightSource],
        log: Callable[[str], None],
    ) -> None:
        self._link, self._backend, self._model, self._weights, self._log = link, backend, model, weights, log
        self._in_flight: deque[Any] = deque()
        self._most = 1

    def run(self) -> str:
        """Follows until rank 0 ends. Returns why: "" for an orderly end.

        Raises:
            Exception: what a call raised; rank 0 was told.
        """
        while True:
            call = self._next()
            if isinstance(call, Stop):
                if not call.reason:  # else they may wait for a host that is gone
                    tell_failure(self._link, "a step", partial(self._collect, 0))
                return call.reason
            during = type(call).__name__ if not isinstance(call, Move) else call.method
            tell_failure(self._link, _WORDS.get(during, during), partial(self._make, call))

    def _next(self) -> Call | Stop:
        """The next call. While there is none the steps in flight are collected, so that a failure is soon known."""
        while True:
            try:
                return self._link.calls.get(timeout=IDLE)
            except Empty:
                tell_failure(self._link, "a step", partial(self._collect, 0))

    def _collect(self, leave: int) -> None:
        while len(self._in_flight) > leave:
            self._backend.collect(self._in_flight.popleft())

    def _make(self, call: Call) -> None:
        backend = self._backend
        if isinstance(call, Submit):
            # Rank 0 has collected all but so many, so this does not wait; it only lets go of them.
            self._collect(self._most - 1)
            self._in_flight.append(backend.submit(call.step()))
        elif isinstance(call, Move):
            getattr(backend, call.method)(call.source.numpy(), call.target.numpy())
        elif isinstance(call, PlanMemory):
            self._link.send(Done(backend.memory(self._model, call.limits)))
        else:
            self._start(call)
            self._link.send(Done())

    def _start(self, call: Load | InitCache | Warmup) -> None:
        if isinstance(call, Load):
            self._log("Loading the weights.")
            self._backend.load(self._model, self._weights())
        elif isinstance(call, InitCache):
            self._most = self._backend.constraints(self._model, call.limits).max_in_flight
            self._backend.init_cache(call.limits, call.num_blocks, call.num_host_blocks)
        else:
            self._log(f"Preparing {len(call.shapes)} shapes." if call.shapes else "Nothing is compiled.")
            self._backend.warmup(call.shapes)
            self._log("Ready; following rank 0.")


_WORDS = {
    "PlanMemory": "planning memory",
    "Load": "loading the weights",
    "InitCache": "allocating the KV cache",
    "Warmup": "warming up",
    "Submit": "a step",
}


def tell_failure(link: LeaderLink, during: str, work: Callable[[], Any]) -> Any:
    """Does something; what it raises is told to rank 0 and raised."""
    try:
        return work()
    except Exception as error:
        trace = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        link.send(Failed(during, Failure.of(error, trace)))
        raise


def follow(
    hosts: Hosts,
    facts: dict[str, Any],
    create: Callable[[], Backend],
    model: ModelSpec,
    weights: Callable[[], WeightSource],
    log: Callable[[str], None],
    on_joined: Callable[[], None] = lambda: None,
) -> None:
    """Joins rank 0, follows it, and returns after an orderly end. The process may end in it: see `end_process`.

    Args:
        hosts: with this host's rank.
        facts: what rank 0 must have equal.
        create: makes this host's backend, once all hosts are there.
        model, weights: opened on this host.
        log: is told what happens, a sentence at a time.
        on_joined: called once all hosts are there.

    Raises:
        OctavoError: this host was refused, or rank 0 has ended; it says why.
        Exception: what a call raised here; rank 0 was told.
    """
    link = LeaderLink(hosts)
    try:
        link.join(facts, log)
        on_joined()
        backend = _until_stopped(link, lambda: tell_failure(link, "starting its device", create))
        follower = Follower(link, backend, model, weights, log)
        reason = _until_stopped(link, follower.run)
        if reason:
            raise EngineDeadError(f"Host {hosts.rank}: rank 0 has ended: {reason}")
        log("Rank 0 has ended; so does this host.")
        backend.close()
        link.send(Bye())
    finally:
        link.close()


def _until_stopped(link: LeaderLink, work: Callable[[], Any]) -> Any:
    """Does something; where it fails the link stays until rank 0 has heard of it, or has ended for that reason."""
    try:
        return work()
    except Exception:
        limit = time.monotonic() + END_WITHIN
        while time.monotonic() < limit:
            try:
                if isinstance(link.calls.get(timeout=IDLE), Stop):
                    break
            except Empty:
                pass
        raise
