"""Checks of a step's inputs against their contract in `core/step.py`. What fails here is a bug in the caller."""

from __future__ import annotations

import numpy as np

from ...core.backend import StepLimits
from ...core.models.spec import ModelSpec
from ...core.step import Step, StepInput, StepShape


class StepError(AssertionError):
    """A step breaks the contract of `StepInput`."""


def check_step(step: Step, model: ModelSpec, limits: StepLimits, num_blocks: int) -> None:
    """Raises StepError unless the step's arrays are what its shape and the contract say.

    Args:
        num_blocks: blocks of the cache, the null block included.
    """
    _check_arrays(step)
    _check_layout(step)
    _check_tokens(step.inputs, step.shape, model, limits)
    _check_blocks(step.inputs, limits, num_blocks)
    _check_rows(step, model, limits)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise StepError(message)


def _check_arrays(step: Step) -> None:
    """Types, dtypes and padded shapes."""
    shape = step.shape
    T, S, B, R, A = shape.tokens, shape.sequences, shape.blocks, shape.rows, shape.sampler.adjust
    inputs, sampling = step.inputs, step.inputs.sampling
    expected = {
        "token_ids": (np.int32, (T,)),
        "positions": (np.int32, (T,)),
        "slot_mapping": (np.int32, (T,)),
        "query_start": (np.int32, (S + 1,)),
        "seq_lens": (np.int32, (S,)),
        "block_tables": (np.int32, (S, B)),
        "logits_rows": (np.int32, (R,)),
        "seed": (np.int32, (R, 2)),
        "adjust_ids": (np.int32, (R, A)),
        "adjust_bias": (np.float32, (R, A)),
        "adjust_counts": (np.int32, (R, A)),
        "adjust_seen": (np.bool_, (R, A)),
        "only_adjusted": (np.bool_, (R,)),
    }
    expected |= dict.fromkeys(("out_slots", "targets", "top_k", "position"), (np.int32, (R,)))
    floats = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
    expected |= dict.fromkeys(floats, (np.float32, (R,)))
    arrays = {**inputs._asdict(), **sampling._asdict()}
    del arrays["sampling"]
    _require(arrays.keys() == expected.keys(), "a field of StepInput has no check")
    for name, (dtype, dims) in expected.items():
        array = arrays[name]
        _require(isinstance(array, np.ndarray), f"{name} is a {type(array).__name__}, not a NumPy array")
        _require(array.dtype == dtype, f"{name} is {array.dtype}, not {np.dtype(dtype)}")
        _require(array.shape == dims, f"{name} has shape {array.shape}, not {dims}")


def _check_layout(step: Step) -> None:
    """Which tokens belong to which sequence; prefill and decode apart."""
    inputs, shape = step.inputs, step.shape
    start, lens = inputs.query_start, inputs.seq_lens
    counts = np.diff(start)
    _require(start[0] == 0, "query_start does not begin with 0")
    _require((counts >= 0).all() and start[-1] <= shape.tokens, "query_start does not ascend within the tokens")
    _require(((lens == 0) == (counts == 0)).all(), "a sequence has a length without tokens, or tokens without a length")
    _require((lens >= counts).all(), "a sequence is shorter than its tokens in this step")
    real = counts > 0
    _require((np.sort(~real) == ~real).all(), "a padded sequence stands before a real one")
    if shape.decode:
        _require(shape.tokens == shape.sequences, "a decode step has as many tokens as sequences")
        _require((counts <= 1).all(), "a decode step has a sequence with several tokens")
    else:
        # Only a sequence that is decoded refers to a token that the device has sampled.
        _require((inputs.token_ids >= 0).all(), "a prefill step has a decoding sequence in it (mixed=False)")


def _check_tokens(inputs: StepInput, shape: StepShape, model: ModelSpec, limits: StepLimits) -> None:
    """Ids, and positions that follow from the lengths."""
    start, lens = inputs.query_start, inputs.seq_lens
    counts, used = np.diff(start), int(start[-1])
    ids = inputs.token_ids
    _require((ids < model.vocab_size).all(), "a token id is outside the vocabulary")
    _require((ids >= -limits.max_num_seqs).all(), "a token id refers to a slot that Cache.sampled does not have")
    expected = np.arange(used) - np.repeat(start[:-1], counts) + np.repeat(lens - counts, counts)
    _require((inputs.positions[:used] == expected).all(), "positions do not follow from seq_lens and query_start")
    _require((lens <= limits.max_model_len).all(), "a sequence is longer than max_model_len")
    _require((inputs.positions[used:] >= 0).all(), "a padded token has a negative position")


def _check_blocks(inputs: StepInput, limits: StepLimits, num_blocks: int) -> None:
    """Slots and block tables within the cache, and in agreement."""
    tables, size = inputs.block_tables, limits.block_size
    used, counts = int(inputs.query_start[-1]), np.diff(inputs.query_start)
    _require(((tables >= 0) & (tables < num_blocks)).all(), "a block table names a block that the cache does not have")
    needed = -(-inputs.seq_lens // size)
    _require((needed <= tables.shape[1]).all(), "a sequence needs more blocks than its table holds")
    # A table may name blocks ahead of the sequence's end; a padded sequence has none at all.
    _require((tables[inputs.seq_lens == 0] == 0).all(), "a padded sequence has blocks")
    slots = inputs.slot_mapping
    _require(((slots >= 0) & (slots < num_blocks * size)).all(), "a slot is outside the cache")
    _require((slots[used:] < size).all(), "a padded token would be written outside the null block")
    sequence = np.repeat(np.arange(len(counts)), counts)
    positions = inputs.positions[:used]
    block = tables[sequence, positions // size]
    expected = block * size + positions % size
    agrees = np.where(block == 0, slots[:used] < size, slots[:used] == expected)
    _require(agrees.all(), "slot_mapping disagrees with the block tables")
    real = slots[:used][block != 0]
    _require(len(np.unique(real)) == len(real), "two tokens would be written to one slot")


def _check_rows(step: Step, model: ModelSpec, limits: StepLimits) -> None:
    """Rows of logits and how they become tokens."""
    inputs, s, sampler = step.inputs, step.inputs.sampling, step.shape.sampler
    _require(((inputs.logits_rows >= 0) & (inputs.logits_rows < step.shape.tokens)).all(), "a logits row has no token")
    kept = s.out_slots[s.out_slots != limits.max_num_seqs]
    _require(((kept >= 0) & (kept < limits.max_num_seqs)).all(), "an out_slot is outside Cache.sampled")
    _require(len(np.unique(kept)) == len(kept), "two rows keep their token in one slot")
    _require((s.targets < model.vocab_size).all(), "a target is outside the vocabulary")
    _require((s.adjust_ids < model.vocab_size).all(), "an adjusted token is outside the vocabulary")
    if sampler.greedy:
        _require((s.temperature == 0).all(), "a greedy program was given a row with a temperature")
    if not sampler.filters:
        off = (s.top_k == 0) & (s.top_p == 1) & (s.min_p == 0)
        _require((off | (s.temperature == 0)).all(), "a program without filters was given a row with a filter")
