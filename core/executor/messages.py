"""What rank 0 and its followers say to each other, as msgpack; nothing in it can be executed."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from ..backend import MemoryPlan, StepLimits
from ..engine.messages import Failure
from ..step import SamplingInput, Step, StepInput, StepShape


class Array(msgspec.Struct, array_like=True):
    """A NumPy array of numbers."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> Array:
        """Copies an array."""
        return cls(array.dtype.str, array.shape, array.tobytes())

    def numpy(self) -> np.ndarray:
        """The array, writable."""
        return np.frombuffer(bytearray(self.data), self.dtype).reshape(self.shape)


# To a follower


class Welcome(msgspec.Struct, tag=True):
    """All hosts are there and alike: create the backend."""


class Refused(msgspec.Struct, tag=True):
    """This host does not fit; it ends."""

    reason: str


class Ping(msgspec.Struct, tag=True):
    """Nothing; sent to find out whether the follower's connection still stands."""


class PlanMemory(msgspec.Struct, tag=True):
    """Answer with the memory plan."""

    limits: StepLimits


class Load(msgspec.Struct, tag=True):
    """Load the weights, which each host opens itself."""


class InitCache(msgspec.Struct, tag=True):
    """Allocate the cache."""

    limits: StepLimits
    num_blocks: int
    num_host_blocks: int


class Warmup(msgspec.Struct, tag=True):
    """Prepare the shapes."""

    shapes: list[StepShape]


class Submit(msgspec.Struct, tag=True):
    """A step; the arrays of StepInput, with those of `sampling`, its last field, at the end."""

    shape: StepShape
    arrays: list[Array]

    @classmethod
    def of(cls, step: Step) -> Submit:
        """Copies a step."""
        *plain, sampling = step.inputs
        return cls(step.shape, [Array.of(a) for a in (*plain, *sampling)])

    def step(self) -> Step:
        """The step again."""
        arrays: list[Any] = [array.numpy() for array in self.arrays]
        split = len(StepInput._fields) - 1
        return Step(self.shape, StepInput._make([*arrays[:split], SamplingInput._make(arrays[split:])]))


class Move(msgspec.Struct, tag=True):
    """Copy or swap blocks; the arrays are the method's."""

    method: Literal["copy_blocks", "swap_out", "swap_in"]
    source: Array
    target: Array


class Stop(msgspec.Struct, tag=True):
    """The end. With a reason it is not an orderly one."""

    reason: str = ""


Call = PlanMemory | Load | InitCache | Warmup | Submit | Move
ToFollower = Call | Welcome | Refused | Ping | Stop

# To rank 0


class Hello(msgspec.Struct, tag=True):
    """A follower is there.

    Attributes:
        rank: who it is.
        facts: what must be equal on all hosts, by a name for people.
    """

    rank: int
    facts: dict[str, Any]


class Done(msgspec.Struct, tag=True):
    """The answer to a call of the start; `plan` to PlanMemory's."""

    plan: MemoryPlan | None = None


class Failed(msgspec.Struct, tag=True):
    """A call raised; the follower ends when it is told to.

    Attributes:
        during: the call, in words.
        failure: what it raised.
    """

    during: str
    failure: Failure


class Bye(msgspec.Struct, tag=True):
    """The follower has closed its backend."""


ToLeader = Hello | Done | Failed | Bye
