"""The null backend: the core's whole protocol without a model, so that what is measured is the core."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from ...core.backend import (
    Backend,
    BackendConfig,
    Cache,
    CacheSpec,
    Capabilities,
    MemoryPlan,
    Ops,
    Step,
    StepConstraints,
    StepInput,
    StepLimits,
    StepOutput,
)
from ...core.models.spec import DTYPE_BYTES, ModelSpec, ParamSpec
from ...core.models.weights import HostTensor, WeightSource
from ...core.ops import StepContext

_PRETENDED_MEMORY = 16 << 30


class NullOps(Ops):
    """Keeps nothing and attends to nothing."""

    def write_cache(self, cache: Any, k: Any, v: Any, ctx: StepContext) -> Any:
        return cache

    def attention(self, q: Any, k: Any, v: Any, cache: Any, ctx: StepContext, window: int | None) -> Any:
        return np.zeros_like(q)


class NullBackend(Backend):
    """Tokens are a function of (the token before, its position); the end-of-sequence token is never among them.

    Steps take `latency` seconds each, one after another, as on a device that works beside the host.
    """

    def __init__(self, config: BackendConfig, latency: float = 0.0) -> None:
        super().__init__(config)
        self.xp = xp
        self.ops = NullOps(xp)
        self._latency = latency
        self._busy_until = 0.0

    def capabilities(self) -> Capabilities:
        dtypes = tuple(DTYPE_BYTES)
        return Capabilities(dtypes=dtypes, kv_dtypes=dtypes, block_sizes=(16, 1, 2, 4, 8, 32, 64, 128, 256))

    def constraints(self, model: ModelSpec, limits: StepLimits) -> StepConstraints:
        return StepConstraints(max_in_flight=2)

    def device_memory(self) -> tuple[int, int]:
        return _PRETENDED_MEMORY, _PRETENDED_MEMORY

    def memory(self, model: ModelSpec, limits: StepLimits) -> MemoryPlan:
        """A pretended device: weights and activations take nothing, KV blocks what they would take elsewhere."""
        block_bytes = self.cache_spec(model, limits).block_bytes
        return MemoryPlan(_PRETENDED_MEMORY, _PRETENDED_MEMORY, 0, 0, block_bytes, self.default_utilization)

    def from_host(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def to_host(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def place(self, param: ParamSpec, value: HostTensor) -> None:
        return None

    def load(self, model: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        self.model, self.params = model, {}
        self._first, self._count = _longest_run(model.vocab_size, model.eos_token_ids)

    def new_layers(self, spec: CacheSpec, num_blocks: int) -> list[None]:
        return [None] * spec.num_layers

    def export_blocks(self, blocks: np.ndarray) -> np.ndarray:
        return np.zeros((len(blocks), 1), np.uint8)

    def import_blocks(self, blocks: np.ndarray, contents: np.ndarray) -> None:
        pass

    def submit(self, step: Step) -> tuple[StepOutput, float]:
        """The handle is the output and the time at which the pretended device is done."""
        inputs, sampler = step.inputs, step.shape.sampler
        tokens = self._next_tokens(inputs)
        rows = len(tokens) if sampler.logprobs >= 0 else 0
        top = max(sampler.logprobs, 0)
        output = StepOutput(
            tokens=tokens,
            logprobs=np.zeros(rows, np.float32),
            ranks=np.ones(rows, np.int32),
            top_ids=np.zeros((rows, top), np.int32),
            top_logprobs=np.zeros((rows, top), np.float32),
        )
        if self._latency:
            self._busy_until = max(self._busy_until, time.monotonic()) + self._latency
        return output, self._busy_until

    def collect(self, handle: tuple[StepOutput, float]) -> StepOutput:
        output, done = handle
        if self._latency:
            time.sleep(max(done - time.monotonic(), 0.0))
        return output

    def _next_tokens(self, inputs: StepInput) -> np.ndarray:
        """int32 [R]; also keeps them in the cache for the steps that refer to them."""
        sampled, rows = self.cache.sampled, inputs.logits_rows
        before = inputs.token_ids[rows]
        before = np.where(before < 0, sampled[(-1 - before) % len(sampled)], before)
        tokens = self._first + (before * 7 + inputs.positions[rows]) % self._count
        tokens = np.where(inputs.sampling.targets >= 0, inputs.sampling.targets, tokens).astype(np.int32, copy=False)
        sampled[inputs.sampling.out_slots] = tokens
        self.cache = Cache(self.cache.layers, sampled)
        return tokens


def _longest_run(vocab_size: int, excluded: tuple[int, ...]) -> tuple[int, int]:
    """(first, count) of the longest run of token ids without an excluded one."""
    edges = [-1, *sorted(e for e in excluded if 0 <= e < vocab_size), vocab_size]
    count, first = max((high - low - 1, low + 1) for low, high in itertools.pairwise(edges))
    return (first, count) if count else (0, vocab_size)
