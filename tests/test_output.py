"""OutputProcessor: text, stop strings and reasons, whatever the cut into tokens."""

from __future__ import annotations

import time

import pytest
from fake_engine import EOS, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.engine.output import CompletionOutput, OutputProcessor, RequestOutput
from octavo.core.engine.stop import StopMatcher
from octavo.core.engine.types import EngineOutput, TokenLogprobs
from octavo.core.sampling.params import SamplingParams

TOKENIZER = byte_tokenizer()


def run(
    params: SamplingParams, steps: list[EngineOutput], tokenizer: object = TOKENIZER
) -> tuple[list[RequestOutput], list[str]]:
    """Deltas of request "r", one batch per engine output; and what was to be aborted."""
    processor = OutputProcessor(tokenizer)  # type: ignore[arg-type]
    processor.add("r", "hi", [104, 105], params)
    deltas, aborts = [], []
    for step in steps:
        processed = processor.process([step])
        deltas += processed.outputs.values()
        aborts += processed.aborts
    return deltas, aborts


def merged(deltas: list[RequestOutput]) -> RequestOutput:
    whole = RequestOutput("r", "hi", [104, 105])
    for delta in deltas:
        whole.merge(delta)
    return whole


def tokens(text: str, reason: str | None = "length", stop_token: int | None = None, ender: int | None = None) -> list:
    """One engine output for each byte of a text; `ender` is one more token, which ends it."""
    ids = [*text.encode(), *([ender] if ender is not None else [])]
    steps = [EngineOutput("r", 0, [token]) for token in ids]
    steps[-1].finish_reason, steps[-1].stop_token = reason, stop_token
    return steps


# --------------------------------------------------------------------------------------------- stop strings


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the first stop string to become complete; the longest of those that end together."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


LETTERS = st.text(alphabet="abé€", max_size=24)
STOPS = st.lists(st.text(alphabet="abé€", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(text=LETTERS, stops=STOPS, include=st.booleans(), data=st.data())
def test_pieces_equal_the_whole(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    """Deltas of random splits equal the reference on the full text, and nothing is held back without need."""
    ids = list(text.encode())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=8)))
    chunks = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    steps = [EngineOutput("r", 0, chunk) for chunk in chunks]
    steps[-1].finish_reason = "length"
    deltas, aborts = run(SamplingParams(stop=stops, include_stop_str_in_output=include, max_tokens=100), steps)
    whole = merged(deltas)
    expected, stop = reference(text, stops, include)
    assert whole.outputs[0].text == expected
    assert whole.finished
    assert whole.outputs[0].stop_reason == stop
    assert whole.outputs[0].finish_reason == ("stop" if stop else "length")
    if stop:
        upto = len(expected) + (0 if include else len(stop))
        assert whole.outputs[0].token_ids == list(text[:upto].encode())
    else:
        assert whole.outputs[0].token_ids == ids
    ended_early = stop is not None and len(deltas) < len(steps)
    assert aborts == (["r"] if ended_early else [])


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=10), stops=STOPS)
def test_what_is_held_back_is_minimal(pieces: list[str], stops: list[str]) -> None:
    """After each piece, what is held is the longest end of the text that a stop string begins with."""
    matcher, text, out = StopMatcher(stops, False), "", ""
    for piece in pieces:
        text += piece
        new, stop = matcher.feed(piece)
        out += new
        if stop:
            return
        ends = [text[i:] for i in range(len(text))]
        held = next((end for end in ends if any(s.startswith(end) and s != end for s in stops)), "")
        assert out + held == text
    assert out + matcher.flush() == text


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab", min_size=1, max_size=12),
    stop=st.text(alphabet="ab", min_size=1, max_size=3),
    least=st.integers(0, 12),
)
def test_min_tokens_lets_early_stop_strings_pass(text: str, stop: str, least: int) -> None:
    deltas, _ = run(SamplingParams(stop=[stop], min_tokens=least, max_tokens=100), tokens(text))
    whole = merged(deltas).outputs[0]
    end = next((e for e in range(max(least, len(stop)), len(text) + 1) if text[:e].endswith(stop)), None)
    if end is None:
        assert (whole.text, whole.finish_reason) == (text, "length")
    else:
        assert (whole.text, len(whole.token_ids), whole.stop_reason) == (text[: end - len(stop)], end, stop)


def test_stop_inside_one_token_chunk_cuts_tokens_and_logprobs() -> None:
    logprobs = [TokenLogprobs(t, -1.0, 1, [], []) for t in b"one.two"]
    deltas, aborts = run(SamplingParams(stop=".", logprobs=0), [EngineOutput("r", 0, [*b"one.two"], logprobs=logprobs)])
    (out,) = deltas[0].outputs
    assert (out.text, out.token_ids, out.stop_reason) == ("one", [*b"one."], ".")
    assert out.logprobs == logprobs[:4]
    assert deltas[0].finished
    assert aborts == ["r"]


def test_stop_string_on_the_last_token_needs_no_abort() -> None:
    deltas, aborts = run(SamplingParams(stop="b"), tokens("ab"))
    assert merged(deltas).outputs[0] == CompletionOutput(0, "a", [*b"ab"], None, "stop", "b")
    assert aborts == []


def test_partial_stop_is_flushed_at_the_end() -> None:
    deltas, _ = run(SamplingParams(stop="xyz"), tokens("abxy"))
    assert [d.outputs[0].text for d in deltas] == ["a", "b", "", "xy"]


# ------------------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize("skip", [True, False])
def test_end_of_sequence_is_no_text(skip: bool) -> None:
    deltas, _ = run(SamplingParams(skip_special_tokens=skip), tokens("ab", "stop", ender=EOS))
    assert merged(deltas).outputs[0] == CompletionOutput(0, "ab", [97, 98, EOS], None, "stop", None)


def test_stop_token_is_no_text_but_is_the_reason() -> None:
    deltas, _ = run(SamplingParams(stop_token_ids=[46]), tokens("ab", "stop", 46, ender=46))
    assert merged(deltas).outputs[0] == CompletionOutput(0, "ab", [97, 98, 46], None, "stop", 46)


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<eos>b")])
def test_special_tokens_in_the_middle(skip: bool, text: str) -> None:
    steps = [EngineOutput("r", 0, [97]), EngineOutput("r", 0, [EOS]), EngineOutput("r", 0, [98], "length")]
    deltas, _ = run(SamplingParams(skip_special_tokens=skip, ignore_eos=True), steps)
    assert merged(deltas).outputs[0].text == text


def test_characters_wait_for_all_their_bytes() -> None:
    deltas, _ = run(SamplingParams(), tokens("a€"))
    assert [d.outputs[0].text for d in deltas] == ["a", "", "", "€"]


def test_incomplete_character_at_the_end_is_replaced() -> None:
    steps = [EngineOutput("r", 0, [97]), EngineOutput("r", 0, ["€".encode()[0]], "length")]
    assert merged(run(SamplingParams(), steps)[0]).outputs[0].text == "a\ufffd"


def test_abort_gives_what_was_held() -> None:
    steps = [*tokens("ab<", None), EngineOutput("r", 0, [], "abort")]
    deltas, aborts = run(SamplingParams(stop="<end>"), steps)
    assert merged(deltas).outputs[0] == CompletionOutput(0, "ab<", [*b"ab<"], None, "abort")
    assert aborts == []


def test_without_detokenizing_there_are_only_ids() -> None:
    deltas, _ = run(SamplingParams(detokenize=False), tokens("ab"), tokenizer=None)
    assert merged(deltas).outputs[0] == CompletionOutput(0, "", [97, 98], None, "length")


# ------------------------------------------------------------------------------------------ several at once


def test_one_of_two_completions_stops_and_the_other_goes_on() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add("r", None, [1], SamplingParams(n=2, stop="."))
    first = processor.process([EngineOutput("r", 0, [46]), EngineOutput("r", 1, [97])])
    assert first.aborts == []
    assert [o.finish_reason for o in first.outputs["r"].outputs] == ["stop", None]
    ignored = processor.process([EngineOutput("r", 0, [98])])
    assert ignored.outputs == {}
    last = processor.process([EngineOutput("r", 0, [99]), EngineOutput("r", 1, [46])])
    assert last.aborts == ["r"]
    assert [(o.index, o.token_ids, o.finish_reason) for o in last.outputs["r"].outputs] == [(1, [46], "stop")]
    assert last.outputs["r"].finished
    assert len(processor) == 0
    assert processor.process([EngineOutput("r", 1, [97])]) == ({}, [])


def test_completion_stopped_here_and_later_ended_by_the_engine_needs_no_abort() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add("r", None, [1], SamplingParams(n=2, stop="."))
    processor.process([EngineOutput("r", 0, [46]), EngineOutput("r", 1, [97])])
    assert processor.process([EngineOutput("r", 0, [97], "length")]).outputs == {}
    last = processor.process([EngineOutput("r", 1, [98], "length")])
    assert last.outputs["r"].finished
    assert last.aborts == []


def test_an_error_ends_all_completions() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add("r", None, [1], SamplingParams(n=3))
    outputs, aborts = processor.process([EngineOutput("r", 1, [], "error", error="The device is gone.")])
    assert outputs["r"].error == "The device is gone."
    assert sorted(o.index for o in outputs["r"].outputs) == [0, 1, 2]
    assert {o.finish_reason for o in outputs["r"].outputs} == {"error"}
    assert outputs["r"].finished
    assert aborts == ["r"]


def test_an_error_of_a_completion_that_stopped_here_ends_the_others() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add("r", None, [1], SamplingParams(n=2, stop="."))
    processor.process([EngineOutput("r", 0, [46]), EngineOutput("r", 1, [97])])
    outputs, _ = processor.process([EngineOutput("r", 0, [], "error", error="gone")])
    assert [(o.index, o.finish_reason) for o in outputs["r"].outputs] == [(1, "error")]
    assert (outputs["r"].finished, outputs["r"].error) == (True, "gone")


def test_several_outputs_of_a_completion_in_one_batch_make_one_delta() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add("id#1", "p", [1, 2], SamplingParams(prompt_logprobs=0), request_id="id")
    prompt_logprobs = [TokenLogprobs(2, -1.0, 1, [], [])]
    outputs, _ = processor.process(
        [
            EngineOutput("id#1", 0, [97], num_cached_tokens=1, prompt_logprobs=prompt_logprobs),
            EngineOutput("id#1", 0, [98]),
            EngineOutput("unknown", 0, [98]),
        ]
    )
    assert list(outputs) == ["id#1"]
    delta = outputs["id#1"]
    assert (delta.request_id, delta.prompt, delta.prompt_token_ids) == ("id", "p", [1, 2])
    assert delta.outputs == [CompletionOutput(0, "ab", [97, 98])]
    assert delta.prompt_logprobs == prompt_logprobs
    assert delta.num_cached_tokens == 1
    later, _ = processor.process([EngineOutput("id#1", 0, [97])])
    assert later["id#1"].num_cached_tokens == 1


def test_merge_keeps_logprobs_and_order_of_completions() -> None:
    one, two = TokenLogprobs(1, -1.0, 1, [], []), TokenLogprobs(2, -1.0, 1, [], [])
    whole = RequestOutput("r", None, [1])
    whole.merge(RequestOutput("r", None, [1], [CompletionOutput(1, "x", [1], [one])]))
    whole.merge(RequestOutput("r", None, [1], [CompletionOutput(0, "y", [2], [two])]))
    whole.merge(RequestOutput("r", None, [1], [CompletionOutput(1, "z", [2], [two], "length")], finished=True))
    assert [(o.index, o.text, o.logprobs) for o in whole.outputs] == [(0, "y", [two]), (1, "xz", [one, two])]
    assert whole.finished


def test_a_thousand_streams_cost_little() -> None:
    """30 tokens a second on 1,000 streams leave 33 µs for a token; this must take a small part of it."""
    processor = OutputProcessor(TOKENIZER)
    for i in range(1000):
        processor.add(str(i), None, [1], SamplingParams(stop=["\n\n", "</s>"], max_tokens=100))
    batch = [EngineOutput(str(i), 0, [97]) for i in range(1000)]
    processor.process(batch)
    best = min(_timed(lambda: processor.process(batch)) for _ in range(5))
    assert best / 1000 < 30e-6


def _timed(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start
