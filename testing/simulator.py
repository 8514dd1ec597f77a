"""A minimal engine for tests: it runs token sequences through a backend in whatever steps it is told to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.backend import StepConstraints
from ..core.models.decoder import forward
from ..core.step import SamplerShape, Step, StepOutput, map_arrays
from .batches import Part, Pool, Stream, build_step, step_shape
from .kit import Loaded


class Simulator:
    """Streams over one backend's cache.

    Attributes:
        streams: the sequences, by their slot.
    """

    def __init__(self, loaded: Loaded, constraints: StepConstraints | None = None, seed: int = 0) -> None:
        self.loaded = loaded
        self.constraints = constraints or loaded.backend.constraints(loaded.model, loaded.limits)
        self.streams: list[Stream] = []
        self._pool = Pool(loaded.num_blocks, seed)

    def open(self) -> Stream:
        """A new, empty sequence."""
        self.streams.append(Stream(slot=len(self.streams)))
        return self.streams[-1]

    def make(self, work: Sequence[tuple[Stream, Sequence[int]]], sampler: SamplerShape = SamplerShape()) -> Step:
        """The step that adds tokens to sequences; its blocks are taken, lengths advance."""
        size = self.loaded.limits.block_size
        for stream, tokens in work:
            stream.reserve(stream.length + len(tokens), size, self._pool)
        parts = [Part(stream, tokens) for stream, tokens in work]
        shape = step_shape(parts, size, self.constraints, sampler)
        step = build_step(parts, shape, size, self.loaded.limits.max_num_seqs)
        for stream, tokens in work:
            stream.length += len(tokens)
        return step

    def run(self, work: Sequence[tuple[Stream, Sequence[int]]], sampler: SamplerShape = SamplerShape()) -> StepOutput:
        """Submits the step and collects its output; rows of padding are cut off."""
        backend = self.loaded.backend
        output = backend.collect(backend.submit(self.make(work, sampler)))
        return map_arrays(lambda a: a[: len(work)], output)

    def logits(self, work: Sequence[tuple[Stream, Sequence[int]]]) -> np.ndarray:
        """The logits of each sequence's last token, float64 [n, V]: the forward pass without the sampler."""
        backend, step = self.loaded.backend, self.make(work)
        inputs = map_arrays(backend.from_host, step.inputs)
        backend.cache, logits = forward(
            self.loaded.model, backend.ops, step.shape, backend.params, backend.cache, inputs
        )
        return self.loaded.numpy(logits)[: len(work)]
