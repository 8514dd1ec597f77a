"""A backend whose "model" is a hash of the whole context, read token by token through the block tables.

Any mistake in paging, prefix sharing, copy-on-write, swapping, chunking or feeding back of sampled tokens changes
the context that some row sees, and so its tokens. `expected_tokens` computes them without any of that.
"""

from __future__ import annotations

import array_api_compat.numpy as xp
import numpy as np

from octavo.core.backend import (
    Backend,
    BackendConfig,
    Capabilities,
    Ops,
    StepConstraints,
    StepOutput,
)
from octavo.core.models.spec import ModelSpec, RopeSpec

VOCAB = 97


def tiny_spec(max_position: int = 256, window: int | None = None, eos: tuple[int, ...] = ()) -> ModelSpec:
    return ModelSpec(
        family="hash",
        vocab_size=VOCAB,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        norm_eps=1e-5,
        rope=RopeSpec((1.0, 0.5, 0.25, 0.125)),
        max_position=max_position,
        sliding_window=(window,),
        eos_token_ids=eos,
    )


def next_token(context: list[int], window: int | None = None) -> int:
    value, seen = 17, context if window is None else context[-window:]
    for token in seen:
        value = (value * 1000003 + token + 1) % 2147483647
    return (value ^ len(context)) % VOCAB


def expected_tokens(prompt: list[int], count: int, window: int | None = None) -> list[int]:
    context, out = list(prompt), []
    while len(out) < count:
        out.append(next_token(context, window))
        context.append(out[-1])
    return out


class HashBackend(Backend):
    """See the module. `fail_at` makes the numbered submits raise; every step's inputs are checked.

    The engine takes what a check raises for a device's fault, so the first is kept in `violation` for the test.
    """

    def __init__(self, spec: ModelSpec, constraints: StepConstraints) -> None:
        super().__init__(BackendConfig("hash"))
        self.xp, self.ops, self.model = xp, Ops, spec
        self.given, self.window = constraints, spec.sliding_window[0]
        self.slots: np.ndarray | None = None
        self.steps, self.fail_at, self.shapes = 0, set(), []
        self.outstanding = 0
        self.violation: AssertionError | None = None

    def capabilities(self) -> Capabilities:
        return Capabilities(("float32",), ("float32",), (4, 16))

    def constraints(self, model, limits):
        return self.given

    def device_memory(self):
        return 1 << 30, 1 << 30

    def from_host(self, array):
        return array.copy()

    def to_host(self, array):
        return array

    def place(self, param, value):
        raise NotImplementedError

    def new_layers(self, spec, num_blocks):
        return np.full((num_blocks, spec.block_size), -1, np.int64)

    def export_blocks(self, blocks):
        return np.ascontiguousarray(self.cache.layers[blocks]).view(np.uint8).reshape(len(blocks), -1)

    def import_blocks(self, blocks, contents):
        self.cache.layers[blocks] = np.ascontiguousarray(contents).view(np.int64).reshape(len(blocks), -1)

    def submit(self, step):
        self.steps += 1
        if self.steps in self.fail_at:
            raise RuntimeError("the device stumbled")
        self.outstanding += 1
        try:
            assert self.outstanding <= self.given.max_in_flight
            return self._run(step)
        except AssertionError as error:
            self.violation = self.violation or error
            raise

    def _run(self, step):
        x, shape, size = step.inputs, step.shape, self.limits.block_size
        self.shapes.append(shape)
        sizes = self.given.decode if shape.decode else self.given.prefill
        if sizes.sequences is not None:
            assert shape in self.given.shapes()
        assert x.token_ids.shape == x.positions.shape == x.slot_mapping.shape == (shape.tokens,)
        assert x.block_tables.shape == (shape.sequences, shape.blocks)
        assert x.logits_rows.shape == x.sampling.out_slots.shape == (shape.rows,)
        ids = np.where(x.token_ids < 0, self.cache.sampled[np.clip(-1 - x.token_ids, 0, None)], x.token_ids)
        flat = self.cache.layers.reshape(-1)
        count = x.query_start[-1]
        written = x.slot_mapping[:count]
        assert (written >= size).all(), "a real token goes to the null block"
        assert len(set(written.tolist())) == count, "two tokens of a step share a slot"
        flat[x.slot_mapping] = ids
        tokens = np.zeros(shape.rows, np.int32)
        kinds = set()
        for s in range(shape.sequences):
            first, last = x.query_start[s], x.query_start[s + 1]
            if last == first:
                continue
            length = x.seq_lens[s]
            kinds.add("decode" if last - first == 1 else "prefill")
            assert (x.positions[first:last] == np.arange(length - (last - first), length)).all()
            table = x.block_tables[s]
            places = table[np.arange(length) // size] * size + np.arange(length) % size
            assert (places[x.positions[first:last]] == x.slot_mapping[first:last]).all()
            context = flat[places].tolist()
            for row in np.flatnonzero((x.logits_rows >= first) & (x.logits_rows < last)):
                upto = int(x.positions[x.logits_rows[row]]) + 1
                seen = context[:upto]
                if self.window is None or upto <= self.window:
                    assert min(seen) >= 0
                tokens[row] = next_token(seen, self.window)
        if not self.given.mixed and "prefill" in kinds:
            assert not shape.decode
        chosen = np.where(x.sampling.targets >= 0, x.sampling.targets, tokens).astype(np.int32)
        live = x.sampling.out_slots < self.limits.max_num_seqs
        self.cache.sampled[x.sampling.out_slots[live]] = chosen[live]
        n = max(0, shape.sampler.logprobs)
        return StepOutput(
            chosen,
            np.full(shape.rows, -1.0, np.float32),
            np.ones(shape.rows, np.int32),
            np.zeros((shape.rows, n), np.int32),
            np.zeros((shape.rows, n), np.float32),
        )

    def collect(self, handle):
        self.outstanding -= 1
        return handle
