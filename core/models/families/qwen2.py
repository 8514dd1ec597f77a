"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows in some layers if asked."""

from __future__ import annotations

from ..config import Config
from .base import LLAMA_NAMES, Family, decoder_spec


def _windows(config: Config) -> tuple[int | None, ...]:
    layers = config.count("num_hidden_layers", high=4096)
    window = config.optional_count("sliding_window") if config.flag("use_sliding_window", False) else None
    kinds = config.data.get("layer_types")
    if kinds is None:
        first = int(config.number("max_window_layers", low=0))
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.error("layer_types", f"must list the kind of each of the {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error("layer_types", f"has {kind!r}; only full_attention and sliding_attention are known")
    if window is None and "sliding_attention" in kinds:
        raise config.error("layer_types", "has sliding_attention, but use_sliding_window or sliding_window is not set")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    gguf_arch="qwen2",
    defaults={
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "tie_word_embeddings": False,
    },
    build=lambda config: decoder_spec(config, "qwen2", qkv_bias=True, sliding_window=_windows(config)),
    names=LLAMA_NAMES,
)
