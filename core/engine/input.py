"""From what the caller gives to an EngineRequest: tokens, and every check that needs no engine."""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized
from dataclasses import fields
from operator import index

import msgspec

from ..errors import RequestError
from ..sampling.params import SamplingParams
from ..tokenizer import Tokenizer
from .types import EngineInfo, EngineRequest

# These are honoured here or by the scheduler, whatever the device: a backend need not name them.
HOST_FIELDS = frozenset(
    {
        "n",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "bad_words",  # checked as the bad_token_ids that they become
        "detokenize",
        "skip_special_tokens",
    }
)


class InputProcessor:
    """Makes EngineRequests for one engine.

    Args:
        info: the engine.
        tokenizer: the model's, or None where there is none.
    """

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        self._info = info
        self._tokenizer = tokenizer
        honoured = HOST_FIELDS | set(info.sampling)
        self._refused = [(f.name, f.default) for f in fields(SamplingParams) if f.name not in honoured]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The prompt's tokens. May be called from any thread.

        Raises:
            RequestError: the model has no tokenizer, or `text` is not valid Unicode.
        """
        if self._tokenizer is None:
            raise RequestError("The model has no tokenizer; give the prompt as token ids.", "prompt")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def build(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
    ) -> EngineRequest:
        """A request that the engine will take, unless its queue is full.

        Raises:
            RequestError: the prompt is empty, too long or not of this vocabulary, or a sampling field cannot be
                honoured.
        """
        tokens = self._checked_prompt(prompt)
        if not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise RequestError(f"priority must be a whole number of 32 bits, not {priority!r}.", "priority")
        if not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt must be a string, not {cache_salt!r}.", "cache_salt")
        params = self._with_bad_words(params)
        _check_types(params)
        params.check_vocabulary(self._info.vocab_size)
        if params.detokenize and self._tokenizer is None:
            raise RequestError("The model has no tokenizer; ask with detokenize=False for token ids.", "detokenize")
        for name, default in self._refused:
            value = getattr(params, name)
            if value != default and not (isinstance(value, Sized) and len(value) == 0):
                raise RequestError(
                    f"{name} is not supported on {self._info.device}; leave it at its default ({default!r}).", name
                )
        return EngineRequest(request_id, tokens, params, priority, cache_salt)

    def _checked_prompt(self, prompt: Sequence[int]) -> list[int]:
        vocab_size, longest = self._info.vocab_size, self._info.max_model_len
        try:
            tokens = [index(token) for token in prompt]
        except TypeError:
            raise RequestError("A prompt must be text or a list of token ids.", "prompt") from None
        if not tokens:
            raise RequestError("The prompt is empty; it must have at least one token.", "prompt")
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            raise RequestError(f"The prompt has token {wrong}; this model's are 0 to {vocab_size - 1}.", "prompt")
        if len(tokens) >= longest:
            raise RequestError(
                f"The prompt has {len(tokens)} tokens, which leaves no room for output: this engine's sequences have "
                f"at most {longest} (--max-model-len). Shorten the prompt.",
                "prompt",
            )
        return tokens

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Turns bad_words into bad_token_ids: each as it is written at the start of a text and after a space."""
        if not params.bad_words:
            return params
        if self._tokenizer is None:
            raise RequestError("The model has no tokenizer; give bad_token_ids in place of bad_words.", "bad_words")
        banned = [list(ids) for ids in params.bad_token_ids or ()]
        for word in params.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise RequestError(f"bad_words must be words, not {word!r}.", "bad_words")
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = self._tokenizer.encode(text, add_special_tokens=False, param="bad_words")
                if ids and ids not in banned:
                    banned.append(ids)
        return params.replaced(bad_words=None, bad_token_ids=banned)


def _check_types(params: SamplingParams) -> None:
    """Decodes them as the engine's process would: there, a wrong type would be an error of the engine, not theirs."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    except (TypeError, OverflowError, msgspec.MsgspecError) as error:
        where = re.search(r"`\$\.(\w+)", str(error))
        name = where[1] if where else None
        raise RequestError(f"{name or 'A sampling field'} has the wrong type: {error}.", name) from None
