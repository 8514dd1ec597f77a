"""The host side of penalties, biases and bans, against a reference that starts afresh at every step."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import RequestError
from octavo.core.sampling.adjust import Adjustments
from octavo.core.sampling.params import SamplingParams

BAN = -math.inf


def make(prompt=(), eos=(0,), vocab_size: int = 20, **fields: Any) -> Adjustments:
    return Adjustments(SamplingParams(**fields), prompt, eos, vocab_size)


def read(adjustments: Adjustments, num_output_tokens: int) -> dict[int, tuple[float, int, bool]]:
    """{token: (bias, count, seen)}; checks the arrays."""
    e = adjustments.entries(num_output_tokens)
    assert [a.dtype for a in e] == [np.int32, np.float32, np.int32, bool]
    assert len({len(a) for a in e}) == 1
    assert len(np.unique(e.ids)) == len(e.ids)
    return {int(i): (float(b), int(c), bool(s)) for i, b, c, s in zip(*e, strict=True)}


def biases(adjustments: Adjustments, num_output_tokens: int = 0) -> dict[int, float]:
    return {token: bias for token, (bias, _, _) in read(adjustments, num_output_tokens).items()}


def test_nothing_to_adjust():
    adjustments = make(prompt=[1, 2, 3])
    adjustments.observe(4)
    assert read(adjustments, 1) == {}
    assert not adjustments.active
    assert not adjustments.only_adjusted
    assert adjustments.max_entries(100) == 0


def test_logit_bias():
    adjustments = make(logit_bias={4: 1.5, 7: -100, 9: BAN})
    assert biases(adjustments) == {4: 1.5, 7: -100.0, 9: BAN}
    assert adjustments.active


def test_penalties_count_the_output():
    adjustments = make(prompt=[1, 2], presence_penalty=0.5)
    assert read(adjustments, 0) == {}
    assert adjustments.active  # from the next token on
    for token in (5, 6, 5):
        adjustments.observe(token)
    assert read(adjustments, 3) == {5: (0.0, 2, False), 6: (0.0, 1, False)}


def test_repetition_penalty_sees_prompt_and_output():
    adjustments = make(prompt=[1, 2, 1, 99, -1], repetition_penalty=1.2)  # a prompt may have placeholders
    assert read(adjustments, 0) == {1: (0.0, 0, True), 2: (0.0, 0, True)}
    adjustments.observe(2)
    adjustments.observe(3)
    assert read(adjustments, 2) == {1: (0.0, 0, True), 2: (0.0, 1, True), 3: (0.0, 1, True)}


def test_allowed_tokens_alone_have_entries():
    adjustments = make(
        prompt=[1, 4],
        allowed_token_ids=[3, 4, 5],
        logit_bias={3: 2.0, 8: 9.0},
        bad_token_ids=[[5], [7]],
        repetition_penalty=1.1,
        min_tokens=2,
    )
    assert adjustments.only_adjusted
    adjustments.observe(9)
    assert read(adjustments, 1) == {3: (2.0, 0, False), 4: (0.0, 0, True), 5: (BAN, 0, False)}
    assert adjustments.max_entries(100) == 3


def test_a_bad_sequence_bans_its_last_token_after_the_others():
    adjustments = make(bad_token_ids=[[1, 2, 3], [2, 4], [2, 3], [6]])
    expected = [{6: BAN}, {6: BAN}, {6: BAN, 3: BAN, 4: BAN}, {6: BAN}, {6: BAN, 3: BAN, 4: BAN}]
    assert biases(adjustments, 0) == expected[0]
    for step, token in enumerate([1, 2, 5, 2], 1):
        adjustments.observe(token)
        assert biases(adjustments, step) == expected[step]


def test_a_bad_sequence_matches_the_output_only():
    assert biases(make(prompt=[1, 2], bad_token_ids=[[1, 2, 3]])) == {}
    adjustments = make(prompt=[1], bad_token_ids=[[1, 2, 3], [7, 7, 7, 7]])
    adjustments.observe(2)
    assert biases(adjustments, 1) == {}
    for _ in range(3):
        adjustments.observe(7)
    assert biases(adjustments, 4) == {7: BAN}


def test_a_passing_ban_leaves_the_entry_as_it_was():
    adjustments = make(bad_token_ids=[[1, 5]], logit_bias={5: 2.5})
    adjustments.observe(1)
    assert biases(adjustments, 1) == {5: BAN}
    adjustments.observe(5)
    assert biases(adjustments, 2) == {5: 2.5}


def test_min_tokens_bans_every_stop():
    adjustments = make(eos=(0, 50), stop_token_ids=[7], min_tokens=2)
    assert biases(adjustments, 0) == biases(adjustments, 1) == {0: BAN, 7: BAN}
    assert biases(adjustments, 2) == {}
    assert adjustments.active
    adjustments.observe(1)
    adjustments.observe(1)
    assert not adjustments.active


def test_min_tokens_counts_what_the_caller_says():
    """A step may be launched before the tokens of the one before it are on the host."""
    adjustments = make(min_tokens=2)
    assert biases(adjustments, 2) == {}
    assert adjustments.active


def test_ignore_eos_leaves_eos_alone():
    assert biases(make(stop_token_ids=[7], min_tokens=2, ignore_eos=True)) == {7: BAN}
    assert biases(make(stop_token_ids=[0], min_tokens=2, ignore_eos=True)) == {0: BAN}
    assert not make(min_tokens=2, ignore_eos=True).active


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [3], "bad_token_ids": [[3]]},
        {"allowed_token_ids": [3, 4], "logit_bias": {3: BAN, 4: BAN}},
        {"allowed_token_ids": [0, 7], "stop_token_ids": [7], "min_tokens": 1},
        {"allowed_token_ids": [0, 3], "bad_token_ids": [[3]], "min_tokens": 1},
    ],
)
def test_allowed_tokens_that_are_all_banned_are_refused(fields):
    with pytest.raises(RequestError, match="allow one more token") as error:
        make(**fields)
    assert error.value.param == "allowed_token_ids"
    # what the message advises works
    make(**{**fields, "allowed_token_ids": [*fields["allowed_token_ids"], 9]})
    make(**{**fields, "min_tokens": 0, "bad_token_ids": None, "logit_bias": None})


def reference(
    params: SamplingParams, prompt: list[int], output: list[int], eos: list[int], vocab: int
) -> dict[int, tuple[float, int, bool]]:
    """The entries, made afresh."""
    counts, penalised = Counter(output), set()
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        penalised |= set(output)
    if params.repetition_penalty != 1:
        penalised |= set(prompt)
    banned = set()
    for words in params.bad_token_ids or ():
        *before, last = words
        if output[len(output) - len(before) :] == before:
            banned.add(last)
    if len(output) < params.min_tokens:
        banned |= {*params.stop_token_ids, *([] if params.ignore_eos else eos)}
    bias = params.logit_bias or {}
    entries = penalised | banned | bias.keys() | set(params.allowed_token_ids or ())
    if params.allowed_token_ids is not None:
        entries &= set(params.allowed_token_ids)
    return {
        t: (
            BAN if t in banned else bias.get(t, 0.0),
            counts[t] if t in penalised else 0,
            params.repetition_penalty != 1 and (t in prompt or t in output),
        )
        for t in entries
        if 0 <= t < vocab
    }


@pytest.mark.parametrize("seed", range(60))
def test_every_step_equals_the_reference(seed):
    r = random.Random(seed)
    vocab = r.choice([6, 30])
    some = lambda most: [r.randrange(vocab) for _ in range(r.randrange(1, most))]  # noqa: E731
    params = SamplingParams(
        repetition_penalty=r.choice([1.0, 1.0, 1.3]),
        presence_penalty=r.choice([0.0, 0.5]),
        frequency_penalty=r.choice([0.0, 0.0, -0.5]),
        logit_bias=r.choice([None, {t: float(t) for t in some(4)}]),
        bad_token_ids=r.choice([None, [some(4) for _ in range(4)]]),
        allowed_token_ids=r.choice([None, None, list(range(vocab))]),
        min_tokens=r.choice([0, 5]),
        stop_token_ids=r.choice([[], some(2)]),
        ignore_eos=r.random() < 0.5,
        max_tokens=50,
    )
    prompt, eos, output = some(10), [0, vocab + 3], []
    adjustments = Adjustments(params, prompt, eos, vocab)
    most = adjustments.max_entries(40)
    for step in range(40):
        expected = reference(params, prompt, output, eos, vocab)
        assert read(adjustments, step) == expected
        assert len(expected) <= most
        assert adjustments.active or not expected
        output.append(r.randrange(vocab))
        adjustments.observe(output[-1])


def test_long_outputs_grow_by_appending():
    adjustments = make(vocab_size=100_000, frequency_penalty=0.1)
    for token in range(5000):
        adjustments.observe(token * 3)
    adjustments.observe(30)
    e = adjustments.entries(5001)
    assert e.ids.tolist() == [t * 3 for t in range(5000)]
    assert e.counts.sum() == 5001
    assert e.counts[10] == 2
