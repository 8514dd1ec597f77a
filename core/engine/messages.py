"""What the caller's process and the engine's process say to each other, as msgpack."""

from __future__ import annotations

import msgspec

from .. import errors
from ..errors import OctavoError, RequestError
from .types import EngineInfo, EngineOutput, EngineRequest, EngineStats

# To the engine


class Work(msgspec.Struct, tag=True):
    """Requests to add, and then requests to abort."""

    add: list[EngineRequest] = []
    abort: list[str] = []


class Shutdown(msgspec.Struct, tag=True):
    """Close the engine and end the process, whatever is under way."""


Command = Work | Shutdown

# From the engine


class Failure(msgspec.Struct):
    """An error that crosses the process boundary.

    Attributes:
        kind: the name of its class in `core.errors`; another exception's is not found there.
        message: its text; for an exception that is no OctavoError, the traceback.
        param: RequestError's.
    """

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException, trace: str) -> Failure:
        """Describes an exception. `trace` is its traceback, told where it is not meant for the user."""
        if isinstance(error, OctavoError):
            return cls(type(error).__name__, str(error), getattr(error, "param", None))
        return cls(type(error).__name__, trace)

    def exception(self, otherwise: type[OctavoError]) -> OctavoError:
        """The same error again; of class `otherwise` where it was no OctavoError."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, OctavoError)):
            return otherwise(f"The engine failed with {self.kind}, which is a bug. {self.message}")
        return RequestError(self.message, self.param) if issubclass(kind, RequestError) else kind(self.message)


class Progress(msgspec.Struct, tag=True):
    """How far a phase of the start is."""

    phase: str
    done: int
    total: int


class Log(msgspec.Struct, tag=True):
    """A line for the log."""

    line: str


class Ready(msgspec.Struct, tag=True):
    """The engine takes requests."""

    info: EngineInfo


class Outputs(msgspec.Struct, tag=True):
    """What a step put out.

    Attributes:
        outputs: the step's outputs.
        refused: requests that the engine did not take, and why.
        stats: counters after the step.
    """

    outputs: list[EngineOutput]
    refused: list[tuple[str, Failure]]
    stats: EngineStats


class Fatal(msgspec.Struct, tag=True):
    """The engine could not start, or has broken; the process ends."""

    failure: Failure


Event = Progress | Log | Ready | Outputs | Fatal
