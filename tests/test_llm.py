"""LLM: prompts of every kind, order, errors and Ctrl-C, over a fake engine."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest
from fake_engine import EOS, FakeEngine, Order, frontend

import octavo
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, EngineDeadError, RequestError
from octavo.core.interrupt import DeferredInterrupt
from octavo.core.llm import LLM
from octavo.core.sampling.params import SamplingParams


def make(**config: Any) -> tuple[LLM, FakeEngine]:
    settings = EngineConfig(**config)
    engine = FakeEngine(settings)
    return LLM.from_engine(engine, frontend(settings), settings.max_waiting), engine  # type: ignore[arg-type]


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


FOUR = SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    "prompts",
    ["abc", [*b"abc"], ["abc"], [[*b"abc"]], {"prompt": "abc"}, {"prompt_token_ids": [*b"abc"]}, [{"prompt": "abc"}]],
)
def test_prompts_of_every_kind(prompts: Any) -> None:
    llm, _ = make()
    (output,) = llm.generate(prompts, FOUR, use_tqdm=False)
    assert output.prompt_token_ids == [*b"abc"]
    assert output.prompt in ("abc", None)
    assert output.finished
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("abca", [*b"abca"])
    assert output.outputs[0].finish_reason == "length"


def test_mixed_prompts_come_back_in_order_with_their_own_params() -> None:
    llm, engine = make(max_num_seqs=4, max_waiting=6)
    prompts: list[Any] = [f"prompt {i} " if i % 2 else [*f"prompt {i} ".encode()] for i in range(50)]
    each = [SamplingParams(max_tokens=1 + i % 17) for i in range(50)]
    outputs = llm.generate(prompts, each, use_tqdm=False)
    assert texts(outputs) == [(f"prompt {i} " * 3)[: 1 + i % 17] for i in range(50)]
    assert engine.most_waiting <= 6
    assert llm.generate([], FOUR, use_tqdm=False) == []


def test_completions_and_stop_strings() -> None:
    llm, engine = make()
    params = SamplingParams(n=3, stop="e", max_tokens=None)
    (output,) = llm.generate("abcdef", params, use_tqdm=False)
    assert [(o.index, o.text, o.stop_reason) for o in output.outputs] == [
        (0, "abcd", "e"),
        (1, "bcd", "e"),
        (2, "cd", "e"),
    ]
    assert not engine.has_work
    assert engine.requests == {}


def test_defaults_are_what_the_makers_recommend() -> None:
    llm, engine = make()
    seen = []
    add = engine.add_request
    engine.add_request = lambda request: (seen.append(request.params), add(request))[1]  # type: ignore[method-assign]
    llm.generate("abc", use_tqdm=False)
    assert seen[0] == SamplingParams(temperature=0.5)


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        (["fine", ""], FOUR, "Prompt 1: The prompt is empty"),
        ([[1], [257]], FOUR, "Prompt 1: .*token 257"),
        (["fine", "a" * 5000], FOUR, "Prompt 1: .*Shorten"),
        (["fine", None], FOUR, "Prompt 1: .*list of token ids"),
        (["fine", 3.5], FOUR, "Prompt 1: .*list of token ids"),
        (["fine", {"text": "x"}], FOUR, "Prompt 1: .*one has text"),
        (["fine", "b"], [FOUR, SamplingParams(min_p=0.5)], "Prompt 1: min_p is not supported"),
        (["fine", "b"], [FOUR], "2 prompts and 1 params"),
    ],
)
def test_invalid_input_is_told_before_anything_runs(prompts: Any, params: Any, text: str) -> None:
    llm, engine = make()
    with pytest.raises(RequestError, match=text):
        llm.generate(prompts, params, use_tqdm=False)
    assert engine.stats().steps == 0
    assert not engine.has_work
    assert texts(llm.generate("abc", FOUR, use_tqdm=False)) == ["abca"]


def test_what_the_engine_cannot_run_does_not_harm_the_others() -> None:
    llm, _ = make()
    outputs = llm.generate(["abc", Order.REFUSE, Order.FAIL, "xyz"], FOUR, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "error", "length"]
    assert [o.error for o in outputs] == [None, "The fake engine refuses this.", "The fake engine fails this.", None]


def test_chat() -> None:
    llm, _ = make()
    hello = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(hello, FOUR, use_tqdm=False)
    assert one.prompt == "user: hello\n> "
    two = llm.chat([hello, [*hello, *hello]], FOUR, use_tqdm=False, add_generation_prompt=False)
    assert [o.prompt for o in two] == ["user: hello\n", "user: hello\nuser: hello\n"]
    assert llm.chat([], FOUR, use_tqdm=False) == []


def test_ctrl_c_leaves_no_request_inside() -> None:
    llm, engine = make()
    step = engine.step

    def interrupted() -> Any:
        outputs = step()
        if engine.stats().steps == 3:
            signal.raise_signal(signal.SIGINT)
        return outputs

    engine.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def"], SamplingParams(max_tokens=None), use_tqdm=False)
    assert engine.stats().steps == 4  # the one after the interrupt gives out the aborts
    assert not engine.has_work
    assert engine.requests == {}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert texts(llm.generate("abc", FOUR, use_tqdm=False)) == ["abca"]


def test_a_second_ctrl_c_is_at_once() -> None:
    reached = []

    def press_twice() -> None:
        with DeferredInterrupt():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            signal.raise_signal(signal.SIGINT)
            reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert reached == [1]


def test_an_interrupt_is_not_lost_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_broken_engine_is_closed() -> None:
    llm, engine = make()
    with pytest.raises(ZeroDivisionError):
        llm.generate(Order.CRASH, FOUR, use_tqdm=False)
    assert engine.closed
    with pytest.raises(EngineDeadError):
        llm.generate("abc", FOUR, use_tqdm=False)


def test_close() -> None:
    llm, engine = make()
    with llm:
        pass
    llm.close()
    assert engine.closed


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    llm, _ = make()
    llm.generate(["abc", [97, EOS]], FOUR)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_modellen; did you mean max_model_len\?"):
        LLM(max_modellen=3)


def test_the_package_is_light_and_exports_what_it_says() -> None:
    assert octavo.LLM is LLM
    assert octavo.SamplingParams is SamplingParams
    assert octavo.__version__
    with pytest.raises(AttributeError):
        octavo.nothing  # noqa: B018
    code = "import sys, octavo; assert not {'numpy', 'msgspec', 'tokenizers', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
