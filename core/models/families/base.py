"""What a model family declares, and how the Llama-shaped ones turn a config.json into a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..rope import rope_spec
from ..spec import DTYPE_BYTES, ModelSpec

# The names of Llama and its many relatives, without ".weight" or ".bias".
LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attn_norm": "model.layers.{i}.input_layernorm",
    "q": "model.layers.{i}.self_attn.q_proj",
    "k": "model.layers.{i}.self_attn.k_proj",
    "v": "model.layers.{i}.self_attn.v_proj",
    "o": "model.layers.{i}.self_attn.o_proj",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "gate": "model.layers.{i}.mlp.gate_proj",
    "up": "model.layers.{i}.mlp.up_proj",
    "down": "model.layers.{i}.mlp.down_proj",
}

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Fields that change the forward pass in ways no family here has, with what they mean. Ignoring one would
# give wrong text without a word, so a value that switches it on is refused.
UNSUPPORTED = {
    "quantization_config": "quantized weights in this format (use the unquantized checkpoint, or a GGUF file)",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "attn_logit_softcapping": "soft-capped attention scores",
    "final_logit_softcapping": "soft-capped logits",
    "attention_chunk_size": "chunked attention",
    "no_rope_layers": "layers without rotary embedding",
    "no_rope_layer_interval": "layers without rotary embedding",
    "kv_lora_rank": "latent attention",
    "use_qk_norm": "normalized queries and keys",
    "qk_layernorm": "normalized queries and keys",
    "embedding_multiplier": "a scaled embedding",
    "residual_multiplier": "scaled residuals",
    "attention_multiplier": "a scaled attention",
    "logits_scaling": "scaled logits",
    "logit_scale": "scaled logits",
}


@dataclass(frozen=True)
class Family:
    """A model family, as data.

    Attributes:
        name: for messages and `ModelSpec.family`.
        architectures: the names in config.json's "architectures" that it covers.
        gguf_arch: "general.architecture" of its GGUF files, or None.
        defaults: what Transformers assumes for fields that a config.json leaves out.
        build: turns a configuration into a ModelSpec.
        names: our parameter names -> checkpoint names without ".weight"/".bias"; "{i}" is the layer.
    """

    name: str
    architectures: tuple[str, ...]
    gguf_arch: str | None
    defaults: Mapping[str, Any]
    build: Callable[[Config], ModelSpec]
    names: Mapping[str, str]

    def spec(self, config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
        """The model that a configuration describes.

        Args:
            config: the contents of config.json.
            where: the file's name, for messages.

        Raises:
            ModelError: a field is missing or senseless, or asks for a feature that is not supported.
        """
        return self.build(Config(config, where, self.defaults))

    def checkpoint_name(self, path: str) -> str:
        """The Hugging Face checkpoint's name for one of our parameter paths, such as "layers.3.q_bias"."""
        *head, name = path.split(".")
        suffix = ".bias" if name.endswith("_bias") else ".weight"
        return self.names[name.removesuffix("_bias")].format(i=head[-1] if head else "") + suffix


def decoder_spec(config: Config, family: str, **features: Any) -> ModelSpec:
    """The ModelSpec of a Llama-shaped config.json.

    Args:
        config: the configuration, the family's defaults included.
        family: the family's name.
        features: ModelSpec fields that only the family can tell, such as qkv_bias.

    Raises:
        ModelError: a field is missing or senseless, or asks for a feature that is not supported.
    """
    for key, meaning in UNSUPPORTED.items():
        value = config.data.get(key)
        off = value is False or (not isinstance(value, bool) and value in (None, 0, 1, [], {}))
        if not off:
            raise config.error(key, f"is set, but {meaning} is not supported for {family} models")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_attention_heads", f"({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    if config.data.get("head_dim") is None and hidden % heads:
        raise config.error("hidden_size", f"({hidden}) is not a multiple of num_attention_heads ({heads})")
    head_dim = config.count("head_dim", hidden // heads, high=4096)
    if head_dim % 2:
        raise config.error("head_dim", f"is {head_dim}, but rotary embedding turns pairs: it must be even")
    activation = config.data.get("hidden_act") or "silu"
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise config.error("hidden_act", f"is {activation!r}, but only {', '.join(ACTIVATIONS)} are known")
    max_position = config.count("max_position_embeddings")
    bos = config.token_ids("bos_token_id")
    return ModelSpec(
        family=family,
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden,
        num_layers=config.count("num_hidden_layers", high=4096),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.count("intermediate_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope_spec(head_dim, config),
        max_position=max_position,
        activation=ACTIVATIONS[activation],
        tie_embeddings=config.flag("tie_word_embeddings", False),
        dtype=_dtype(config),
        eos_token_ids=config.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        **features,
    )


def _dtype(config: Config) -> str:
    """The checkpoint's dtype: "dtype" since Transformers 5, "torch_dtype" before."""
    name = config.data.get("dtype") or config.data.get("torch_dtype") or "float32"
    name = str(name).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise config.error("dtype", f"is {name!r}, but only {', '.join(DTYPE_BYTES)} are supported")
    return name
