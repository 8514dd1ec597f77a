"""Opens a model that has been found: its spec, its weights and its tokenizer, each when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..hub import ModelFiles, resolve_tokenizer
from ..tokenizer import Tokenizer
from .config import Config, read_json
from .families import family_for
from .gguf import GGUFSource, gguf_spec
from .gguf_file import GGUFFile
from .safetensors import SafetensorsSource
from .spec import ModelSpec
from .weights import WeightSource

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass
class LoadedModel:
    """An opened model. Only what is asked for is read, so a process without weights or tokenizer pays nothing.

    Attributes:
        name: what to call it.
        spec: its shape.
        generation_defaults: sampling fields that its makers recommend, such as temperature and top_p.
    """

    name: str
    spec: ModelSpec
    generation_defaults: dict[str, Any]
    _open_weights: Callable[[], WeightSource]
    _open_tokenizer: Callable[[], Tokenizer | None]

    @cached_property
    def weights(self) -> WeightSource:
        """Its weights, mapped and not yet read.

        Raises:
            ModelError: the checkpoint is missing or damaged.
        """
        return self._open_weights()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None where its files have none.

        Raises:
            ModelError: the tokenizer's files are damaged or of an unsupported kind.
        """
        return self._open_tokenizer()


def open_model(files: ModelFiles, tokenizer: str | None = None) -> LoadedModel:
    """Opens a model.

    Args:
        files: from `hub.resolve`.
        tokenizer: a directory or Hugging Face id to take the tokenizer from, in place of the model's own.

    Raises:
        ModelError: the model is damaged or not supported, or there is no such tokenizer.
    """
    model = _open_gguf(files) if files.kind == "gguf" else _open_directory(files)
    if tokenizer is not None:
        directory = resolve_tokenizer(tokenizer)
        model = replace(model, _open_tokenizer=lambda: Tokenizer.from_directory(directory))
    return model


def _open_gguf(files: ModelFiles) -> LoadedModel:
    file = GGUFFile(files.path)
    spec = gguf_spec(file)

    def open_tokenizer() -> Tokenizer | None:
        return Tokenizer.from_gguf(file) if "tokenizer.ggml.model" in file.metadata else None

    return LoadedModel(
        files.name, spec, dict(files.generation_defaults), lambda: GGUFSource(file, spec), open_tokenizer
    )


def _open_directory(files: ModelFiles) -> LoadedModel:
    directory = files.path
    config_file = directory / "config.json"
    config = read_json(config_file)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelError(f'{config_file}: "architectures" is missing, so the model\'s family is not known. Add it.')
    family = family_for(architectures, str(config_file))
    if config.get("dtype") is None and config.get("torch_dtype") is None:
        config["dtype"] = SafetensorsSource(directory, family).dtype
    spec = family.spec(config, str(config_file))
    generation_file = directory / "generation_config.json"
    generation = Config(read_json(generation_file) if generation_file.is_file() else {}, str(generation_file))
    eos = dict.fromkeys((*spec.eos_token_ids, *generation.token_ids("eos_token_id")))
    defaults = {key: generation.data[key] for key in SAMPLING_DEFAULTS if generation.data.get(key) is not None}
    return LoadedModel(
        files.name,
        replace(spec, eos_token_ids=tuple(eos)),
        defaults,
        lambda: SafetensorsSource(directory, family),
        lambda: _directory_tokenizer(directory),
    )


def _directory_tokenizer(directory: Path) -> Tokenizer | None:
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    return Tokenizer.from_directory(directory)
