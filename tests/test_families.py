"""Model families: config.json to ModelSpec, compared with what Transformers makes of the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.core.errors import ModelError
from octavo.core.models.families import FAMILIES, family_for, family_for_gguf
from octavo.core.models.spec import ModelSpec, model_params

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def spec_of(architecture: str = "LlamaForCausalLM", **fields: Any) -> ModelSpec:
    return family_for([architecture]).spec({**TINY, **fields})


def saved(config: Any, folder: Path) -> dict[str, Any]:
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("hf", [LlamaConfig, MistralConfig, Qwen2Config])
def test_fields_are_those_of_transformers(hf: Any, tmp_path: Path) -> None:
    config = hf(**TINY, rms_norm_eps=1e-5, tie_word_embeddings=True, eos_token_id=[5, 7], bos_token_id=3)
    spec = family_for([hf.__name__.replace("Config", "ForCausalLM")]).spec(saved(config, tmp_path))
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (96, 32, 3)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size) == (4, 2, 8, 48)
    assert (spec.norm_eps, spec.max_position, spec.tie_embeddings) == (1e-5, 512, True)
    assert (spec.eos_token_ids, spec.bos_token_id, spec.activation) == ((5, 7), 3, "silu")
    assert spec.qkv_bias == (hf is Qwen2Config)
    assert not spec.o_bias
    assert spec.sliding_window == ((config.sliding_window if hf is MistralConfig else None,) * 3)


@pytest.mark.parametrize("hf", [LlamaConfig, MistralConfig, Qwen2Config])
def test_defaults_are_those_of_transformers(hf: Any) -> None:
    """What a config.json leaves out means what Transformers takes it to mean."""
    bare = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    bare |= {"num_attention_heads": 32, "hidden_size": 64}
    theirs = hf(**bare)
    ours = family_for([hf.__name__.replace("Config", "ForCausalLM")]).spec(bare)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.sliding_window[0] == (theirs.sliding_window if hf is MistralConfig else None)


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        YARN,
        YARN | {"beta_fast": 20, "beta_slow": 2, "truncate": False},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        YARN | {"attention_factor": 1.3},
    ],
)
def test_rope_equals_transformers(theta: float, head_dim: int, scaling: dict[str, Any] | None) -> None:
    fields = {**TINY, "head_dim": head_dim}
    config = LlamaConfig(**fields, rope_parameters={**(scaling or {"rope_type": "default"}), "rope_theta": theta})
    if scaling is None:
        expected, factor = LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    old = spec_of(**fields, rope_theta=theta, rope_scaling=scaling)
    new = spec_of(**fields, rope_parameters={**(scaling or {}), "rope_theta": theta})
    assert old.rope == new.rope
    np.testing.assert_allclose(old.rope.inv_freq, expected.numpy(), rtol=3e-7)
    assert old.rope.attention_factor == pytest.approx(factor)


def test_rope_in_old_spelling_of_the_type() -> None:
    linear = spec_of(rope_scaling={"type": "linear", "factor": 2.0})
    assert linear.rope.inv_freq[0] == 0.5


@pytest.mark.parametrize("form", ["generated", "listed"])
@pytest.mark.parametrize(("use", "first"), [(False, 1), (True, 0), (True, 1), (True, 9)])
def test_qwen2_windows_equal_transformers(use: bool, first: int, form: str, tmp_path: Path) -> None:
    config = Qwen2Config(**TINY, use_sliding_window=use, sliding_window=16, max_window_layers=first)
    data = saved(config, tmp_path)
    if form == "generated":
        data.pop("layer_types")
        data["sliding_window"] = 16
    expected = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)
    assert family_for(["Qwen2ForCausalLM"]).spec(data).sliding_window == expected


def test_mistral_window_may_be_null() -> None:
    assert spec_of("MistralForCausalLM", sliding_window=None).freeable_window is None
    assert spec_of("MistralForCausalLM", sliding_window=64).freeable_window == 64


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float16", "torch.float16"])
def test_dtype_in_both_spellings(key: str, value: str) -> None:
    assert spec_of(**{key: value}).dtype == "float16"


def test_biases_and_explicit_head_dim_of_llama() -> None:
    spec = spec_of(attention_bias=True, mlp_bias=True, head_dim=16)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.head_dim) == (True, True, True, 16)
    family = family_for(["LlamaForCausalLM"])
    names = {family.checkpoint_name(p.path) for p in model_params(spec) if p.kind != "table"}
    assert "model.layers.2.self_attn.o_proj.bias" in names
    assert "model.layers.0.mlp.down_proj.bias" in names
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= names


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": ["x"]}}, "rope_scaling has type"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": YARN, "rope_theta": 0.5}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_size": 33}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_attention_heads": 3, "hidden_size": 33}, "num_key_value_heads"),
        ({"vocab_size": "big"}, "vocab_size is 'big'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"hidden_act": "relu6"}, "hidden_act"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"use_qk_norm": True}, "normalized queries and keys"),
        ({"attn_logit_softcapping": 50.0}, "soft-capped"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
    ],
)
def test_refuses_and_says_which_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=r"^config.json") as caught:
        spec_of(**fields)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("MistralForCausalLM", {"sliding_window": 8, "layer_types": ["full_attention"] * 3}),
        ("MistralForCausalLM", {"layer_types": 3}),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 3}),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"]}),
        ("Qwen2ForCausalLM", {"layer_types": ["chunked_attention"] * 3}),
    ],
)
def test_refuses_layer_types_that_do_not_fit(architecture: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="layer_types"):
        spec_of(architecture, **fields)


def test_features_that_are_switched_off_are_fine() -> None:
    spec_of(num_local_experts=0, attn_logit_softcapping=None, logits_scaling=1.0, use_qk_norm=False)


def test_unknown_architecture_lists_the_supported() -> None:
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel.*LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"):
        family_for(["GPT2LMHeadModel"])
    with pytest.raises(ModelError, match=r"'gpt2' is not supported. Supported: llama, qwen2"):
        family_for_gguf("gpt2", "x.gguf")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = [
    *TINY,
    *("head_dim", "rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "hidden_act", "sliding_window"),
    *("layer_types", "use_sliding_window", "max_window_layers", "eos_token_id", "bos_token_id", "dtype"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "original_max_position_embeddings"),
]


@settings(max_examples=300, deadline=None)
@given(family=st.sampled_from(FAMILIES), junk=st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=4))
def test_junk_in_a_config_is_a_model_error_or_a_spec(family: Any, junk: dict[str, Any]) -> None:
    try:
        spec = family.spec({**TINY, **junk})
    except ModelError:
        return
    assert len(spec.rope.inv_freq) == spec.head_dim // 2
    assert len(spec.sliding_window) == spec.num_layers
