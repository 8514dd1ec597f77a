"""The control channel: rank 0 binds the port after the coordinator's, every follower connects to it.

ZeroMQ's heartbeats run in its own thread, so a process that computes without a pause, or holds Python's lock, counts as
alive; one that has ended, is stopped, or whose host is gone does not.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from ..errors import ConfigError, EngineDeadError
from .facts import difference
from .messages import Bye, Hello, Ping, Refused, Stop, ToFollower, ToLeader, Welcome

HEARTBEAT = 1000  # milliseconds between two heartbeats
SILENCE = 5000  # milliseconds without any after which a peer is lost
CHECK = 500  # milliseconds between two looks at whether the followers are connected
START_WITHIN = 600.0  # seconds for all hosts to come
REMIND = 15.0  # seconds between two lines about who is missing
LAST_WORDS = 2000  # milliseconds for a last message to go out


def control_address(coordinator: str) -> tuple[str, int]:
    """Host and port of the control channel: the coordinator's next port.

    Raises:
        ConfigError: the host's name is not known.
    """
    host, _, port = coordinator.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port) + 1, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--coordinator {coordinator}: the host is not known ({error.strerror or error}).") from error
    return str(found[0][4][0]), int(port) + 1


def endpoint(address: tuple[str, int]) -> str:
    """The address as ZeroMQ writes it."""
    host, port = address
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def set_up(sock: zmq.Socket, linger: int = LAST_WORDS) -> None:
    """Heartbeats, no limit on what is queued, IPv6."""
    sock.set_hwm(0)
    sock.linger = linger
    sock.ipv6 = True
    sock.heartbeat_ivl, sock.heartbeat_timeout, sock.heartbeat_ttl = HEARTBEAT, SILENCE, SILENCE


class Followers:
    """Rank 0's end: waits for the followers, then sends to all and listens, in a thread of its own.

    Args:
        coordinator: "host:port".
        count: hosts in all.
    """

    def __init__(self, coordinator: str, count: int) -> None:
        self._count = count
        self._where = control_address(coordinator)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToLeader)
        self._peers: dict[bytes, int] = {}  # ZeroMQ's name for a connection -> rank
        self._gone: set[int] = set()  # ranks that said Bye
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        set_up(self._router)
        self._router.router_mandatory = True
        self._outbox, self._inbox = (self._context.socket(zmq.PAIR) for _ in range(2))
        for pair in (self._outbox, self._inbox):
            pair.set_hwm(0)
            pair.linger = 0
        self._inbox.bind("inproc://calls")
        self._outbox.connect("inproc://calls")
        self._thread: threading.Thread | None = None
        try:
            self._router.bind(endpoint(self._where))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"Rank 0 cannot listen on {self._where[0]} port {self._where[1]}, the port after --coordinator's: "
                f"{error.strerror}. Give an address of this host, and a port that is free together with the next one."
            ) from error

    def gather(self, facts: dict[str, Any], log: Callable[[str], None]) -> None:
        """Waits until every follower is there and like this host, and welcomes them.

        Args:
            facts: this host's.
            log: is told who is missing.

        Raises:
            ConfigError: a follower is different; all are told.
            EngineDeadError: not all came in time.
        """
        limit, remind = time.monotonic() + START_WITHIN, 0.0
        while len(self._peers) < self._count - 1:
            now = time.monotonic()
            missing = [r for r in range(1, self._count) if r not in self._peers.values()]
            names = ", ".join(map(str, missing))
            if now > limit:
                reason = f"Hosts that did not come within {START_WITHIN:.0f} s: {names}."
                self._to_all(Stop(reason))
                raise EngineDeadError(f"{reason} Start them with the same command and their --host-rank.")
            if now > remind:
                remind = now + REMIND
                log(f"Rank 0 of {self._count} waits on {self._where[0]} port {self._where[1]} for rank {names}.")
            if self._router.poll(CHECK):
                self._greet(facts, log)
            else:
                for rank in self._unreachable():
                    self._peers = {peer: r for peer, r in self._peers.items() if r != rank}
        self._to_all(Welcome())

    def _greet(self, facts: dict[str, Any], log: Callable[[str], None]) -> None:
        peer, data = self._router.recv_multipart()
        try:
            hello = self._decoder.decode(data)
        except msgspec.DecodeError:  # another release, whose hello has another form
            hello = None
        if not isinstance(hello, Hello):
            self._send(peer, Refused("Rank 0 does not understand this host: use the same release of Octavo."))
            log("A host that does not speak this release's protocol was refused.")
            return
        reason = difference(facts, hello.facts, hello.rank)
        if reason:
            self._send(peer, Refused(reason))
            self._to_all(Stop(reason))
            raise ConfigError(reason)
        if hello.rank in self._peers.values():
            reason = f"There is a host with --host-rank {hello.rank} already: give each its own."
            self._send(peer, Refused(reason))
            log(f"{reason} The second one was refused.")
            return
        self._peers[peer] = hello.rank

    def listen(self, on_message: Callable[[int, Any], None], on_lost: Callable[[str], None]) -> None:
        """Starts the thread. It calls `on_message` with (rank, message), and `on_lost` with a sentence, once."""
        self._thread = threading.Thread(
            target=self._run, args=(on_message, on_lost), name="octavo-followers", daemon=True
        )
        self._thread.start()

    def send(self, message: ToFollower) -> None:
        """Sends to all followers, in order. From the thread that made this object."""
        self._outbox.send(self._encoder.encode(message))

    def _run(self, on_message: Callable[[int, Any], None], on_lost: Callable[[str], None]) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._inbox, zmq.POLLIN)
        check, lost, open_ = 0.0, False, True
        while open_ or self._router.poll(0):
            ready = dict(poller.poll(CHECK))
            if self._router in ready:
                self._take(on_message)
            if self._inbox in ready:
                data = self._inbox.recv()
                if data:
                    self._broadcast(data)
                else:  # the end
                    open_ = False
            if time.monotonic() - check > CHECK / 1000 and not lost:
                check = time.monotonic()
                missing = [r for r in self._unreachable() if r not in self._gone]
                if missing and not self._router.poll(0):  # what it said last comes first
                    lost = True
                    on_lost(f"Host {missing[0]} of {self._count} is lost: it has ended or cannot be reached.")

    def _take(self, on_message: Callable[[int, Any], None]) -> None:
        peer, data = self._router.recv_multipart()
        rank = self._peers.get(peer)
        with suppress(msgspec.DecodeError):
            if rank is None:  # one too many; it came too late
                self._send(peer, Refused("All hosts are there already: rank 0 waits for no more."))
                return
            message = self._decoder.decode(data)
            if isinstance(message, Bye):
                self._gone.add(rank)
            on_message(rank, message)

    def _unreachable(self) -> list[int]:
        ping = self._encoder.encode(Ping())
        return [rank for peer, rank in self._peers.items() if not self._send_raw(peer, ping)]

    def _to_all(self, message: ToFollower) -> None:
        self._broadcast(self._encoder.encode(message))

    def _broadcast(self, data: bytes) -> None:
        for peer in self._peers:
            self._send_raw(peer, data)

    def _send(self, peer: bytes, message: ToFollower) -> None:
        self._send_raw(peer, self._encoder.encode(message))

    def _send_raw(self, peer: bytes, data: bytes) -> bool:
        try:
            self._router.send_multipart((peer, data))
        except zmq.ZMQError:  # no such connection any more
            return False
        return True

    def close(self) -> None:
        """Ends the thread and closes the sockets, after what was sent has gone out. Idempotent."""
        if self._context.closed:
            return
        if self._thread is not None:
            self._outbox.send(b"")
            self._thread.join()
        for sock in (self._outbox, self._inbox, self._router):
            sock.close()
        self._context.term()
