"""A simulated accelerator: static shapes, prepared before traffic, inputs taken at their word.

It computes as the reference does, but takes only what real hardware of this kind takes, and complains where that
would give wrong numbers or a stall. An engine that runs here needs no surprises from a TPU or from Neuron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...core.backend import Buckets, CompileAfterReadyError, StepConstraints, StepLimits
from ...core.models.spec import ModelSpec
from ...core.sampling.params import MAX_LOGPROBS
from ...core.step import Cache, SamplerShape, Step, StepOutput, StepShape
from .backend import ReferenceBackend
from .checks import check_step

_LEAST_TOKENS = 16


class StaticReferenceBackend(ReferenceBackend):
    """The reference with buckets, separate prefill and decode, and a compiler that is closed after warm-up.

    Attributes:
        programs: how many shapes were compiled.
        ready: whether warm-up is over.
    """

    programs: int = 0
    ready: bool = False

    def constraints(self, model: ModelSpec, limits: StepLimits) -> StepConstraints:
        sequences = ladder(1, limits.max_num_seqs)
        blocks = ladder(1, limits.max_blocks)
        self._constraints = StepConstraints(
            decode=Buckets(sequences=sequences, blocks=blocks),
            prefill=Buckets(
                tokens=ladder(_LEAST_TOKENS, limits.max_num_batched_tokens), sequences=sequences, blocks=blocks
            ),
            mixed=False,
            samplers=(SamplerShape(), full_sampler(model, limits)),
            max_in_flight=2,
        )
        return self._constraints

    def compile(self, shape: StepShape) -> Callable[..., tuple[Cache, StepOutput]]:
        if self.ready:
            raise CompileAfterReadyError(f"{shape} would be compiled while requests wait.")
        self.programs += 1
        return super().compile(shape)

    def warmup(self, shapes: Sequence[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        super().warmup(shapes, progress)
        self.ready = True

    def submit(self, step: Step) -> Any:
        check_step(step, self.model, self.limits, self.cache.layers[0].keys.shape[0])
        return super().submit(step)


def ladder(low: int, high: int) -> tuple[int, ...]:
    """Powers of two from `low`, each eight times the one before, up to the least power of two that holds `high`.

    Eight wastes more of a step than two would, but each rung multiplies the number of programs.
    """
    top = max(low, 1 << (high - 1).bit_length())
    rungs = [low]
    while rungs[-1] < top:
        rungs.append(min(rungs[-1] * 8, top))
    return tuple(rungs)


def full_sampler(model: ModelSpec, limits: StepLimits) -> SamplerShape:
    """The sampler that covers every request: penalties need an entry for each token that a sequence may have."""
    entries = min(model.vocab_size, 1 << (limits.max_model_len - 1).bit_length())
    return SamplerShape(greedy=False, filters=True, adjust=entries, logprobs=min(MAX_LOGPROBS, model.vocab_size))
