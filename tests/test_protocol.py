"""Requests are checked strictly: what is taken, what is refused, and what the refusal says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.core.errors import RequestError
from octavo.server.errors import APIError, param_name
from octavo.server.protocol import ChatRequest, CompletionRequest, parse

MESSAGES = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> CompletionRequest:
    request = parse(CompletionRequest, json.dumps({"prompt": "hello", **fields}).encode())
    request.check()
    return request


def chat(**fields: Any) -> ChatRequest:
    request = parse(ChatRequest, json.dumps({"messages": MESSAGES, **fields}).encode())
    request.check()
    return request


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("one", ["one"]),
        ("", [""]),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompt_forms(given: Any, prompts: Any) -> None:
    assert completion(prompt=given).prompt == prompts


@pytest.mark.parametrize("given", [None, 5, [], {}, [1, "a"], ["a", [1]], [1.5], [True], [[True]], [[1], ["a"]]])
def test_prompt_of_another_form_is_refused(given: Any) -> None:
    with pytest.raises(APIError) as error:
        completion(prompt=given)
    assert error.value.status == 400
    assert error.value.param == "prompt"


WRONG = [
    ("max_tokens", "abc"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("n", 0),
    ("n", 129),
    ("n", "2"),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("seed", 2**70),
    ("stop", ""),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop", ["x"] * 65),
    ("stop_token_ids", ["a"]),
    ("logit_bias", {"hello": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "a"}),
    ("logit_bias", {"5": float("nan")}),
    ("logit_bias", [1]),
    ("min_tokens", 99),
    ("prompt_logprobs", 99),
    ("priority", 2**40),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("allowed_token_ids", []),
    ("user", 5),
    ("service_tier", "priority"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
@pytest.mark.parametrize("make", [completion, chat])
def test_wrong_value_names_its_field(make: Any, name: str, value: Any) -> None:
    fields = {"max_tokens": 5, name: value}
    with pytest.raises(APIError) as error:
        make(**fields).sampling_params({})
    assert error.value.status == 400
    assert (error.value.param or "").split(".")[0].split("[")[0] == name
    assert error.value.message


UNSUPPORTED_CHAT = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("audio", {"voice": "alloy"}),
    ("modalities", ["text", "audio"]),
    ("reasoning_effort", "low"),
    ("web_search_options", {}),
    ("top_logprobs", 2),
    ("guided_json", {}),
    ("echo", True),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED_CHAT)
def test_what_chat_cannot_honour_is_refused(name: str, value: Any) -> None:
    with pytest.raises(APIError) as error:
        chat(**{name: value})
    assert (error.value.status, error.value.param) == (400, name)


@pytest.mark.parametrize(
    ("name", "value"), [("suffix", "x"), ("best_of", 3), ("tools", []), ("use_beam_search", True), ("logprobs", True)]
)
def test_what_completions_cannot_honour_is_refused(name: str, value: Any) -> None:
    with pytest.raises(APIError) as error:
        completion(**{name: value})
    assert (error.value.status, error.value.param) == (400, name)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    completion(user="me", metadata={"a": "b"}, store=True, best_of=1, suffix="", seed=None, stop=None, logit_bias=None)
    chat(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        parallel_tool_calls=True,
        prediction={"type": "content", "content": "x"},
        safety_identifier="x",
        service_tier="auto",
    )


def test_chat_fields_become_sampling_params() -> None:
    request = chat(
        max_tokens=3,
        max_completion_tokens=7,
        logprobs=True,
        top_logprobs=4,
        stop="x",
        logit_bias={"5": -100},
        top_k=-1,
        seed=1,
    )
    params = request.sampling_params({})
    assert (params.max_tokens, params.logprobs, tuple(params.stop)) == (7, 4, ("x",))
    assert (params.logit_bias, params.top_k, params.seed) == ({5: -100.0}, 0, 1)
    assert chat().sampling_params({}).max_tokens is None
    assert chat(logprobs=True).sampling_params({}).logprobs == 0
    assert chat().sampling_params({}).logprobs is None


def test_max_completion_tokens_is_named_as_the_client_named_it() -> None:
    with pytest.raises(APIError) as error:
        chat(max_completion_tokens=0).sampling_params({})
    assert error.value.param == "max_completion_tokens"
    assert "max_completion_tokens must be at least 1" in error.value.message


def test_models_defaults_hold_unless_the_client_says_otherwise() -> None:
    defaults = {"temperature": 0.3, "top_p": 0.9, "unknown": 1}
    params = completion(temperature=1.0).sampling_params(defaults)
    assert (params.temperature, params.top_p) == (1.0, 0.9)
    plain = completion().sampling_params({})
    assert (plain.temperature, plain.top_p) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b"[" * 5000, "invalid_json"),
        (b"[1]", "invalid_type"),
        (b"{}", "missing_required_parameter"),
        (b'{"prompt": "a", "colour": 1}', "unknown_parameter"),
    ],
)
def test_malformed_bodies(body: bytes, code: str) -> None:
    with pytest.raises(APIError) as error:
        parse(CompletionRequest, body)
    assert (error.value.status, error.value.code) == (400, code)


def test_message_parts() -> None:
    assert len(chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}]).messages) == 1
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "a", 1):
        with pytest.raises(APIError) as error:
            chat(messages=[*MESSAGES, {"role": "user", "content": [part]}])
        assert error.value.param == "messages[1].content"
    for messages, param in (([], "messages"), ([{"content": "x"}], "messages[0].role"), ("x", "messages")):
        with pytest.raises(APIError) as error:
            chat(messages=messages)
        assert error.value.param == param


def test_prompt_logprobs_are_not_streamed() -> None:
    with pytest.raises(APIError, match="stream to false"):
        completion(prompt_logprobs=1, stream=True)


def test_param_name() -> None:
    assert param_name(("messages", 0, "content")) == "messages[0].content"
    assert param_name(()) == ""


def test_vocabulary_is_checked_with_the_field_named() -> None:
    params = completion(logit_bias={"999": 1}).sampling_params({})
    with pytest.raises(RequestError) as error:
        params.check_vocabulary(257)
    assert error.value.param == "logit_bias"
