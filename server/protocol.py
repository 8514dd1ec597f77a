"""The requests of the OpenAI protocol, and the fields that vLLM adds to them, checked strictly.

What a client asks for is done or refused: a field that this server does not know, or knows and cannot honour, is an
error that names it. Fields that cannot change the answer (`user`, `metadata`, …) are accepted. null is as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..core.errors import RequestError
from ..core.sampling.params import SamplingParams
from .errors import APIError, validation_error

MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 1024

Prompt = str | list[int]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_prompt(value: Any) -> list[Prompt]:
    """Any form of prompt → a list of prompts."""
    prompts = value if isinstance(value, list) and not (value and _is_ids(value)) else [value]
    if not all(isinstance(p, str) or _is_ids(p) for p in prompts) or len({type(p) for p in prompts}) > 1:
        raise PydanticCustomError(
            "prompt_type",
            "it must be a string, a list of strings, a list of token ids or a list of such lists",
        )
    if not prompts:
        raise PydanticCustomError("prompt_value", "it must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise PydanticCustomError("prompt_value", f"it has more than {MAX_PROMPTS} prompts; send several requests")
    return prompts


def _check_stop(value: Any) -> list[str] | None:
    stop = [value] if isinstance(value, str) else value
    if stop is not None and not (isinstance(stop, list) and all(isinstance(s, str) for s in stop)):
        raise PydanticCustomError("stop_type", "it must be a string or a list of strings")
    return stop


def _check_logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("bias_type", "it must be an object of token ids and numbers")
    out = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise PydanticCustomError("bias_value", f"its key {key!r:.40} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError("bias_value", f"the bias of token {key} must be a number from -100 to 100")
        out[int(key)] = float(bias)
    return out


Prompts = Annotated[
    list[Prompt],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
Stop = Annotated[
    list[str] | None,
    PlainValidator(_check_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]
LogitBias = Annotated[
    dict[int, float] | None,
    PlainValidator(_check_logit_bias),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}),
]


class Body(BaseModel):
    """A request's body: no conversions between types, no unknown fields, no NaN and no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    """`stream_options`. Obfuscation is padding against eavesdroppers and has no influence on the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(Body):
    """What completions and chat completions have in common.

    Class attributes:
        unsupported: fields of the protocol that cannot be honoured: the values that ask for nothing, and why.
    """

    unsupported: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # How to sample
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None

    # When to end
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None

    # What to return, and how to run
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, max_length=256)

    # Accepted, since they cannot change the answer
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Raises APIError for what no single field shows."""
        for name, (neutral, why) in self.unsupported.items():
            if getattr(self, name) not in neutral:
                raise APIError(400, f"{why} Leave '{name}' out.", param=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options is only for stream: true.", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            text = "prompt_logprobs cannot be streamed; set stream to false."
            raise APIError(400, text, param="prompt_logprobs", code="unsupported_parameter")

    def params_given(self) -> dict[str, Any]:
        """The fields of SamplingParams that the client gave."""
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys()
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    def sampling_params(self, defaults: Mapping[str, Any], **changes: Any) -> SamplingParams:
        """How to sample: `changes` over what the client gave over the model's defaults.

        Raises:
            APIError: a value is out of range.
        """
        known = {k: v for k, v in defaults.items() if k in SamplingParams.__dataclass_fields__ and v is not None}
        try:
            return SamplingParams(**{**known, **self.params_given(), **changes})
        except RequestError as error:
            name = self.client_name(error.param)
            message = str(error).replace(error.param, name) if error.param and name else str(error)
            raise APIError(400, message, param=name, code="invalid_value") from error

    def client_name(self, name: str | None) -> str | None:
        """What the client calls a field of SamplingParams."""
        return name


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    unsupported: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "suffix": ((None, ""), "Insertion before a suffix is not supported."),
    }

    prompt: Prompts
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            text = f"best_of ({self.best_of}) other than n ({self.n or 1}) is not supported. Leave it out."
            raise APIError(400, text, param="best_of", code="unsupported_parameter")
        if self.max_tokens == 0 and not self.echo:
            raise APIError(400, "max_tokens must be at least 1; 0 needs echo: true.", param="max_tokens")


class Message(BaseModel):
    """One message of a chat. What else it has (tool calls, reasoning) is for the model's chat template."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: str
    content: Annotated[
        str | list[dict[str, Any]] | None,
        PlainValidator(lambda value: _check_content(value)),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
    ] = None


def _check_content(value: Any) -> str | list[dict[str, Any]] | None:
    if isinstance(value, list):
        for i, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise PydanticCustomError(
                    "content_value",
                    f'part {i} is of type {kind!r:.40}; this model reads only {{"type": "text", "text": …}}',
                )
    elif value is not None and not isinstance(value, str):
        raise PydanticCustomError("content_type", "it must be a string or a list of text parts")
    return value


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "tools": ((None, []), "Tool calling is not supported."),
        "tool_choice": ((None, "none", "auto"), "Tool calling is not supported."),
        "functions": ((None, []), "Function calling is not supported."),
        "function_call": ((None, "none", "auto"), "Function calling is not supported."),
        "response_format": ((None, {"type": "text"}), 'Only response_format {"type": "text"} is supported.'),
        "audio": ((None,), "Audio output is not supported."),
        "modalities": ((None, ["text"]), "Only text output is supported."),
        "reasoning_effort": ((None,), "reasoning_effort is not supported; see chat_template_kwargs."),
        "verbosity": ((None,), "verbosity is not supported."),
        "web_search_options": ((None,), "Web search is not supported."),
    }

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    audio: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    # Accepted: without tools there is nothing to call in parallel; a prediction only makes answers come sooner.
    parallel_tool_calls: bool | None = None
    prediction: Any = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise APIError(400, "messages is empty; give at least one message.", param="messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
        if self.add_special_tokens:
            text = "A chat template writes its special tokens itself; leave add_special_tokens out."
            raise APIError(400, text, param="add_special_tokens", code="unsupported_parameter")

    def params_given(self) -> dict[str, Any]:
        given = super().params_given()
        given.pop("logprobs", None)
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        given.setdefault("max_tokens", None)
        return given

    def client_name(self, name: str | None) -> str | None:
        if name == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "top_logprobs" if name == "logprobs" else name


class TokenizeRequest(Body):
    """POST /tokenize: a prompt or a chat to token ids."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize: token ids to text."""

    model: str | None = None
    tokens: list[int]


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(model: type[AnyBody], body: bytes | bytearray) -> AnyBody:
    """A request's body as a model.

    Raises:
        APIError: it is not JSON, not UTF-8, or not such a request.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise validation_error(details) from None
