"""Chat templates: messages in, the text that the model was trained on out.

Templates are Jinja2 and come with the model, so they are rendered in a sandbox. What they may use (filters,
functions, the `generation` tag, whitespace rules) is what Transformers gives them, since they are written for it:
https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ModelError, RequestError

PARAM = "messages"
# Stands at the end of a message that is to be continued, to find where the template put it. The space at its end
# shows whether the template strips what it is given.
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
PROBE = "octavo-probe"


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant says, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration is not a ClassVar

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not be."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class ChatTemplate:
    """One chat template.

    Args:
        source: the Jinja2 text.
        variables: what every rendering knows, such as bos_token and eos_token.

    Attributes:
        source: as given.

    Raises:
        ModelError: the template is not valid Jinja2.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables: dict[str, Any] = {"tools": None, "documents": None, **variables}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"The model's chat template is not valid Jinja2 (line {error.lineno}: {error.message}). Correct it, "
                "or give another one."
            ) from error

    @cached_property
    def takes_parts(self) -> bool:
        """Whether message content may be a list of {"type": "text"} parts, found out by trying."""
        parts = [{"type": "text", "text": PROBE}]
        try:
            text = self._template.render(
                **self._variables, messages=[{"role": "user", "content": parts}], add_generation_prompt=False
            )
        except Exception:  # whatever the template does with a list it does not expect, it is a no
            return False
        # A template that does not look into the list prints it as Python or JSON, keys and all.
        return PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt's text.

        Args:
            messages: the conversation in the OpenAI protocol's form.
            add_generation_prompt: whether to end with the start of an assistant message.
            tools: function descriptions in the OpenAI protocol's form.
            continue_final_message: whether the text stops inside the last message, for the model to go on with it.
            template_kwargs: further variables for the template, such as enable_thinking.

        Raises:
            RequestError: the messages are malformed, or the template refuses them (param "messages").
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: the model either goes on with "
                "the last message or starts a new one. Set one of them to false.",
                "continue_final_message",
            )
        conversation = [self._message(message, f"{PARAM}[{i}]") for i, message in enumerate(messages)]
        if not conversation:
            raise RequestError("messages is empty; give at least one message.", PARAM)
        if continue_final_message:
            _append_text(conversation[-1], CONTINUE_TAG)
        variables = {
            **self._variables,
            **template_kwargs,
            "messages": conversation,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(**variables)
        except jinja2.TemplateError as error:
            raise RequestError(f"The model's chat template refuses these messages: {error}", PARAM) from error
        except Exception as error:  # a template is a program, and can fail in any way a program can
            raise RequestError(
                f"The model's chat template cannot render these messages ({type(error).__name__}: {error}).", PARAM
            ) from error
        return _cut_at_tag(text) if continue_final_message else text

    def _message(self, message: Any, where: str) -> dict[str, Any]:
        """A message as templates expect it: no nulls, no parts they cannot take, tool arguments as objects."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} is not an object with a role.", PARAM)
        plain = {key: value for key, value in message.items() if value is not None}
        content = plain.get("content")
        if isinstance(content, (list, tuple)):
            texts = [_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
            plain["content"] = [{"type": "text", "text": t} for t in texts] if self.takes_parts else "\n".join(texts)
        elif content is not None and not isinstance(content, str):
            raise RequestError(f"{where}.content is not a text or a list of parts.", PARAM)
        if "tool_calls" in plain:
            plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in plain["tool_calls"]]
        return plain


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestError(f'{where} is of type {kind!r}; this model reads only {{"type": "text"}} parts.', PARAM)
    return part["text"]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """The protocol sends arguments as JSON text; templates are written for the object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise RequestError(f"{where} has an entry without a function.", PARAM)
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} has arguments that are not valid JSON ({error}).", PARAM) from error
    return {**call, "function": function}


def _append_text(message: dict[str, Any], text: str) -> None:
    content = message.get("content")
    if isinstance(content, list) and content:
        content[-1] = {**content[-1], "text": content[-1]["text"] + text}
    elif isinstance(content, str):
        message["content"] = content + text
    else:
        raise RequestError("continue_final_message is set, but the last message has no text to continue.", PARAM)


def _cut_at_tag(text: str) -> str:
    at = text.rfind(CONTINUE_TAG.strip())
    if at < 0:
        raise RequestError("The model's chat template drops the last message, so it cannot be continued.", PARAM)
    cut = text[:at]
    # Without the tag's space the template has stripped the message, so space before the tag must go as well.
    return cut if text.startswith(CONTINUE_TAG, at) else cut.rstrip()
