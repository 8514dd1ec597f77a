"""What the caller's process needs of a model: its tokenizer and its makers' sampling defaults, not its weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..config import EngineConfig
from ..hub import resolve
from ..models.loader import open_model
from ..tokenizer import Tokenizer


class Frontend(NamedTuple):
    """The part of a model outside of the engine.

    Attributes:
        tokenizer: None where the model has none.
        generation_defaults: SamplingParams fields that its makers recommend.
    """

    tokenizer: Tokenizer | None
    generation_defaults: dict[str, Any]


def open_frontend(config: EngineConfig) -> Frontend:
    """Opens the tokenizer that belongs to a configuration; downloads the model where it must.

    Raises:
        ModelError: the model or its tokenizer cannot be found or read.
    """
    model = open_model(resolve(config.model, config.revision), config.tokenizer)
    return Frontend(model.tokenizer, model.generation_defaults)
