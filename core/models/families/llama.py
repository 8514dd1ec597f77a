"""Llama 2 and 3, and the models that share their code, such as SmolLM2."""

from __future__ import annotations

from ..config import Config
from ..spec import ModelSpec
from .base import LLAMA_NAMES, Family, decoder_spec


def _build(config: Config) -> ModelSpec:
    attention_bias = config.flag("attention_bias", False)
    return decoder_spec(
        config, "llama", qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=config.flag("mlp_bias", False)
    )


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    gguf_arch="llama",
    defaults={"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
    build=_build,
    names=LLAMA_NAMES,
)
