"""Text to tokens and back, for a model's directory or GGUF file, and its chat template.

Directories follow the Hugging Face layout: tokenizer.json (https://huggingface.co/docs/tokenizers), with
tokenizer_config.json, special_tokens_map.json, chat_template.jinja and chat_template.json beside it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from .chat_template import ChatTemplate
from .detokenize import (
    ByteFallbackStream,
    ByteLevelStream,
    DecoderShape,
    DetokenizeStream,
    GenericStream,
    byte_level_bytes,
    fallback_byte,
)
from .errors import ModelError, RequestError
from .gguf_tokenizer import token_text, tokenizer_from_gguf
from .models.config import read_json
from .models.gguf_file import GGUFFile

__all__ = ["DetokenizeStream", "Tokenizer"]

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: the tokenizer proper.
        named_tokens: bos_token, eos_token and so on -> text, as chat templates know them.
        chat_templates: name -> Jinja2 source; the usual one is called "default".
        extra_eos: texts of tokens beside eos_token that end a sequence, such as an end of turn.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        extra_eos: Sequence[str] = (),
    ) -> None:
        # A file may ask for padding or truncation, which are for training; a prompt must never be cut silently.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._named = dict(named_tokens or {})
        self._sources = dict(chat_templates or {})
        self._templates: dict[str, ChatTemplate] = {}
        self._shape = DecoderShape(backend)
        added = backend.get_added_tokens_decoder()
        self._special = {index for index, token in added.items() if token.special}
        self._bytes: dict[int, bytes] = {}
        texts = [self._named.get("eos_token"), *extra_eos]
        ids = [backend.token_to_id(text) for text in texts if text]
        self._eos = tuple(dict.fromkeys(i for i in ids if i is not None))

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Opens the tokenizer of a model directory.

        Raises:
            ModelError: there is none, or a file of it is damaged.
        """
        config = _optional_json(directory / "tokenizer_config.json")
        special = _optional_json(directory / "special_tokens_map.json")
        named = _named_tokens({**special, **config})
        templates = _chat_templates(directory, config)
        file = directory / "tokenizer.json"
        if not file.is_file():
            return cls(_through_transformers(directory), named, templates)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the tokenizers package raises plain Exception
            raise ModelError(f"{file} cannot be read ({error}); download it again.") from error
        _add_missing_tokens(backend, config, named, directory)
        _set_ends(backend, config, named)
        return cls(backend, named, templates)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """Builds the tokenizer that a GGUF file describes.

        Raises:
            ModelError: the file has none, or one of a kind that is not supported.
        """
        backend = tokenizer_from_gguf(file)
        short = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
        named = {f"{name}_token": token_text(file, key) for name, key in short.items()}
        templates = {"default": file.metadata.get("tokenizer.chat_template")}
        for name in file.metadata.get("tokenizer.chat_templates", []):
            templates[str(name)] = file.metadata.get(f"tokenizer.chat_template.{name}")
        return cls(
            backend,
            {name: text for name, text in named.items() if text is not None},
            {name: source for name, source in templates.items() if isinstance(source, str)},
            [text for text in (token_text(file, "eot"), token_text(file, "eom")) if text],
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id. A model's logits may have more columns, for padding."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence by the tokenizer's account; the model's configuration may name others."""
        return self._eos

    @property
    def bos_token_id(self) -> int | None:
        """The token that texts start with, or None."""
        text = self._named.get("bos_token")
        return None if text is None else self._backend.token_to_id(text)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as it stands in the vocabulary; None for an id that has none."""
        if not 0 <= token_id < 1 << 32:
            return None
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as it stands in the vocabulary; None where it is not in it."""
        return self._backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a mark such as an end of turn, which decoding leaves out by default."""
        return token_id in self._special

    def encode(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
        """The tokens of a text.

        Args:
            text: any text, of any length.
            add_special_tokens: whether to add what the model expects around a text, such as its first token.
            param: the request's field that the text comes from, for the error.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        if not isinstance(text, str):
            raise RequestError(f"{param} is of type {type(text).__name__}, but a text is needed.", param)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{param} is not valid Unicode: half of a surrogate pair stands at character {error.start}. Send the "
                "character itself, or both halves.",
                param,
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; ids outside of the vocabulary count as nothing."""
        return self._backend.decode([i for i in ids if 0 <= i < 1 << 32], skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be part of a character; b"" for an unknown id."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._token_bytes(token_id)
        return found

    def _token_bytes(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if self._shape.kind == "byte_level":
            return byte_level_bytes(token)
        if self._shape.kind == "byte_fallback":
            byte = fallback_byte(token)
            return token.replace("▁", " ").encode() if byte is None else bytes([byte])
        # Other decoders treat the first token of a text on its own, mostly by dropping a space: a second one tells.
        first, both = (self.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        return (both.removeprefix(first) if both.startswith(first) else first).encode()

    def stream(self, skip_special_tokens: bool = True) -> DetokenizeStream:
        """A decoder of one growing sequence; its pieces, joined, equal `decode` of all its tokens."""
        skipped = self._special if skip_special_tokens else frozenset()
        if self._shape.kind == "byte_level":
            return ByteLevelStream(lambda i: b"" if i in skipped else self.token_bytes(i))
        if self._shape.kind == "byte_fallback":
            return ByteFallbackStream(lambda i: None if i in skipped else self.id_to_token(i), self._shape.strips_space)
        return GenericStream(self._backend, skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return bool(self._sources)

    @property
    def chat_template(self) -> str | None:
        """The Jinja2 source of the usual chat template, or None."""
        return self._sources.get("default")

    def with_chat_template(self, source: str) -> Tokenizer:
        """This tokenizer with another chat template.

        Raises:
            ModelError: the template is not valid Jinja2.
        """
        other = Tokenizer(self._backend, self._named, {"default": source})
        other._eos = self._eos
        other._template(None)
        return other

    def _template(self, tools: object) -> ChatTemplate:
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            named = f" under the name 'default', only {', '.join(self._sources)}" if self._sources else ""
            raise RequestError(
                f"The model has no chat template{named}, so it cannot take messages. Send a prompt to the completions "
                "endpoint, or start the server with a chat template.",
                "messages",
            )
        if name not in self._templates:
            self._templates[name] = ChatTemplate(self._sources[name], self._named)
        return self._templates[name]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The text of a conversation; see `ChatTemplate.render`.

        Raises:
            RequestError: there is no template, or it refuses the messages (param "messages").
            ModelError: the model's template is not valid Jinja2.
        """
        return self._template(tools).render(
            messages, add_generation_prompt, tools, continue_final_message, **template_kwargs
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """The tokens of a conversation. Nothing is put around them: the template has done that.

        Raises:
            RequestError: as `apply_chat_template`, or the text is not valid Unicode.
        """
        text = self.apply_chat_template(
            messages, add_generation_prompt, tools, continue_final_message, **template_kwargs
        )
        return self.encode(text, add_special_tokens=False, param="messages")


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(token: Any) -> str | None:
    """A token in a configuration file is its text, or an object with its text in "content"."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _text(config.get(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in found.items() if text is not None}


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source. Later Transformers write files; files win over tokenizer_config.json, as they do there."""
    templates: dict[str, Any] = {}
    inline = config.get("chat_template")
    if isinstance(inline, list):
        templates |= {str(t.get("name")): t.get("template") for t in inline if isinstance(t, dict)}
    elif isinstance(inline, dict):
        templates |= inline
    elif inline is not None:
        templates["default"] = inline
    legacy = _optional_json(directory / "chat_template.json").get("chat_template")
    if legacy is not None:
        templates["default"] = legacy
    try:
        for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            templates[file.stem] = file.read_text(encoding="utf-8")
        file = directory / "chat_template.jinja"
        if file.is_file():
            templates["default"] = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); download it again.") from error
    return {name: source for name, source in templates.items() if isinstance(source, str)}


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str], directory: Path
) -> None:
    """Adds tokens that only tokenizer_config.json knows, as Transformers does when it opens the directory."""
    listed = config.get("added_tokens_decoder")
    entries = listed.items() if isinstance(listed, dict) else ()
    for index, entry in sorted(entries, key=lambda item: int(item[0]) if item[0].isdecimal() else -1):
        text = _text(entry)
        if text is None or backend.token_to_id(text) is not None:
            continue
        flags = {k: entry[k] for k in ("lstrip", "rstrip", "single_word", "normalized", "special") if k in entry}
        backend.add_tokens([AddedToken(text, **{k: bool(v) for k, v in flags.items()})])
        if str(backend.token_to_id(text)) != index:
            raise ModelError(
                f"{directory}: tokenizer_config.json gives token {text!r} the id {index}, which does not fit "
                "tokenizer.json. Get both files from the same revision."
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in dict.fromkeys(named.values()) if text not in known]
    # A named token is special, whether or not tokenizer.json says so; one with no id at all is not made up.
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in missing if backend.token_to_id(text) is not None]
    )


def _set_ends(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Where tokenizer_config.json says what goes around a text, it wins over tokenizer.json, as in Transformers."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    ends = {
        "BOS": named.get("bos_token") if config.get("add_bos_token") else None,
        "EOS": named.get("eos_token") if config.get("add_eos_token") else None,
    }
    tokens = {name: text for name, text in ends.items() if text and backend.token_to_id(text) is not None}
    backend.post_processor = processors.TemplateProcessing(
        single=["BOS"] * ("BOS" in tokens) + ["$A"] + ["EOS"] * ("EOS" in tokens),
        special_tokens=[
            {"id": name, "ids": [backend.token_to_id(text)], "tokens": [text]} for name, text in tokens.items()
        ],
    )


def _through_transformers(directory: Path) -> tokenizers.Tokenizer:
    """Old formats (SentencePiece's tokenizer.model, vocab.json) are converted by Transformers, if it is there."""
    old = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (directory / name).is_file()]
    if not old:
        raise ModelError(f"{directory} has no tokenizer.json; give the tokenizer's directory or id with --tokenizer.")
    how = "Install Transformers to convert it, or give a tokenizer that has tokenizer.json with --tokenizer"
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(f"{directory} has no tokenizer.json, only {old[0]}. {how}.") from error
    try:
        backend = transformers.AutoTokenizer.from_pretrained(str(directory)).backend_tokenizer
    except Exception as error:  # it fails in many ways, missing packages among them
        raise ModelError(f"{directory}: Transformers cannot convert {old[0]} ({error}). {how}.") from error
    return tokenizers.Tokenizer.from_str(backend.to_str())
