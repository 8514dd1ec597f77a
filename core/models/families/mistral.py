"""Mistral: Llama with a sliding window in every layer, in its first version."""

from __future__ import annotations

from ..config import Config
from ..spec import ModelSpec
from .base import LLAMA_NAMES, Family, decoder_spec


def _build(config: Config) -> ModelSpec:
    window = config.optional_count("sliding_window")
    layers = config.count("num_hidden_layers", high=4096)
    kind = "full_attention" if window is None else "sliding_attention"
    if config.data.get("layer_types") not in (None, [kind] * layers):
        raise config.error("layer_types", f"is not {kind} in every layer, but Mistral's layers are all alike")
    return decoder_spec(config, "mistral", sliding_window=(window,) * layers)


MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    gguf_arch=None,  # Mistral's GGUF files call themselves "llama"
    defaults={
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    build=_build,
    names=LLAMA_NAMES,
)
