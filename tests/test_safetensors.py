"""Safetensors checkpoints: what Transformers wrote comes back bit for bit, and damage is an error, not a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from octavo.core.errors import ModelError
from octavo.core.hub import ModelFiles
from octavo.core.models.families import family_for
from octavo.core.models.loader import LoadedModel, open_model
from octavo.core.models.safetensors import SafetensorsFile
from octavo.core.models.spec import ParamSpec, model_params
from octavo.core.models.weights import HostTensor, build_params

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-bias": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
}


def make(kind: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **fields: Any) -> Any:
    model_class, config_class, extra = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**TINY, **extra, **fields))
    for parameter in model.parameters():  # biases and norms start constant, which would hide a mix-up
        torch.nn.init.normal_(parameter)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model


def opened(folder: Path) -> LoadedModel:
    return open_model(ModelFiles("tiny", "directory", folder))


def bits(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    return tensor.detach().numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shard", ["1GB", "10KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_reads_what_transformers_wrote(kind: str, dtype: str, shard: str, tied: bool, tmp_path: Path) -> None:
    model = make(kind, tmp_path, getattr(torch, dtype), shard, tie_word_embeddings=tied)
    assert (tmp_path / "model.safetensors").exists() == (shard == "1GB")
    loaded = opened(tmp_path)
    assert loaded.spec.dtype == dtype
    assert loaded.spec.tie_embeddings == tied
    state = model.state_dict()
    family = family_for([type(model).__name__])
    used = set()
    for param in model_params(loaded.spec):
        if param.kind == "table":
            continue
        name = family.checkpoint_name(param.path)
        host = loaded.weights.read(param)
        assert (host.dtype, host.data.shape) == (dtype, param.shape)
        np.testing.assert_array_equal(host.data, bits(state[name]))
        np.testing.assert_array_equal(host.float32(), state[name].float().numpy())
        used.add(name)
    assert used == set(state) - ({"lm_head.weight"} if tied else set())


def test_reading_copies_nothing(tmp_path: Path) -> None:
    make("llama", tmp_path)
    loaded = opened(tmp_path)
    data = loaded.weights.read(next(model_params(loaded.spec))).data
    assert not data.flags.owndata
    assert not data.flags.writeable


def test_build_params_makes_the_whole_tree(tmp_path: Path) -> None:
    make("qwen2", tmp_path)
    loaded = opened(tmp_path)
    tree = build_params(loaded.spec, loaded.weights, lambda _, host: host.float32().copy())
    assert {"embed", "rope_inv_freq", "norm", "lm_head", "layers"} == set(tree)
    assert {"q_bias", "k_bias", "v_bias", "gate", "down"} <= set(tree["layers"][1])


def test_dtype_comes_from_the_weights_where_the_config_has_none(tmp_path: Path) -> None:
    make("llama", tmp_path, torch.bfloat16)
    edit(tmp_path / "config.json", lambda config: config.pop("dtype"))
    assert opened(tmp_path).spec.dtype == "bfloat16"


def test_generation_config_adds_eos_and_defaults(tmp_path: Path) -> None:
    make("llama", tmp_path, eos_token_id=5)
    generation = {"eos_token_id": [7, 5], "temperature": 0.6, "top_p": 0.9, "max_length": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    loaded = opened(tmp_path)
    assert loaded.spec.eos_token_ids == (5, 7)
    assert loaded.generation_defaults == {"temperature": 0.6, "top_p": 0.9}


def edit(path: Path, change: Any) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_untied_without_lm_head_says_how_to_tie(tmp_path: Path) -> None:
    make("llama", tmp_path, tie_word_embeddings=True)
    edit(tmp_path / "config.json", lambda config: config.update(tie_word_embeddings=False))
    loaded = opened(tmp_path)
    with pytest.raises(ModelError, match=r'lm_head.weight is missing.*"tie_word_embeddings": true'):
        build_params(loaded.spec, loaded.weights, lambda _, host: None)


def test_wrong_shape_names_tensor_and_both_shapes(tmp_path: Path) -> None:
    make("llama", tmp_path)
    edit(tmp_path / "config.json", lambda config: config.update(vocab_size=97))
    loaded = opened(tmp_path)
    with pytest.raises(ModelError, match=r"model.embed_tokens.weight has shape \[96, 32\].*\[97, 32\]"):
        loaded.weights.read(next(model_params(loaded.spec)))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    make("llama", tmp_path, shard="10KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} is missing"):
        _ = opened(tmp_path).weights


def test_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    make("llama", tmp_path)
    loaded = opened(tmp_path)
    with pytest.raises(ModelError, match=r"model.layers.0.self_attn.q_proj.bias is missing"):
        loaded.weights.read(ParamSpec("layers.0.q_bias", (32,), "bias"))


@pytest.mark.parametrize("weight_map", [{"x": "../model.safetensors"}, {"x": 3}, ["x"], None])
def test_index_that_makes_no_sense(weight_map: Any, tmp_path: Path) -> None:
    make("llama", tmp_path, shard="10KB")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"model.safetensors.index.json"):
        _ = opened(tmp_path).weights


def test_pickled_checkpoint_says_to_convert(tmp_path: Path) -> None:
    make("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pytorch_model.bin.*safe_serialization=True"):
        _ = opened(tmp_path).weights
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"has no model.safetensors and no"):
        _ = opened(tmp_path).weights


def test_the_advice_for_pickled_checkpoints_works(tmp_path: Path) -> None:
    make("llama", tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "kept.json")
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    model.save_pretrained(tmp_path / "converted", safe_serialization=True)
    assert opened(tmp_path / "converted").weights


@pytest.mark.parametrize("config", ["{}", '{"architectures": "LlamaForCausalLM"}', "[]", "{", "\xff", "[" * 100000])
def test_config_that_makes_no_sense(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config.json"):
        opened(tmp_path)


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "length", "what"),
    [
        ({"a": entry()}, b"", 1 << 40, "longer than the file"),
        ({"a": entry()}, b"1234", None, "tensor a ends beyond the file"),
        (b"{nonsense", b"", None, "not valid JSON"),
        (b"[" * 100_000, b"", None, "not valid JSON"),
        (b"[]", b"", None, "not a JSON object"),
        ({"a": entry(offsets=(8, 0))}, bytes(8), None, "tensor a ends beyond"),
        ({"a": entry(offsets=(0, 4))}, bytes(4), None, r"is F32 \[2\] but has 4 bytes"),
        ({"a": entry(), "b": entry()}, bytes(8), None, "overlaps"),
        ({"a": entry(offsets=(4, 12))}, bytes(12), None, "gap"),
        ({"a": entry()}, bytes(9), None, "1 bytes at the end"),
        ({"a": entry(shape=(-1,))}, bytes(8), None, "malformed shape"),
        ({"a": entry(shape=(2.0,))}, bytes(8), None, "malformed shape"),
        ({"a": {"dtype": "F32"}}, b"", None, "malformed entry"),
        ({"a": 3}, b"", None, "malformed entry"),
        ({"a": entry("Q9")}, bytes(8), None, "dtype 'Q9'"),
    ],
)
def test_damaged_file_is_named_with_what_is_wrong(
    header: Any, data: bytes, length: int | None, what: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.safetensors", header, data, length)
    with pytest.raises(ModelError, match=what) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


def test_integer_tensor_where_a_weight_should_be(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path / "m.safetensors", {"a": entry("I32")}, bytes(8)))
    with pytest.raises(ModelError, match="tensor a is I32, but only F64, F32, F16, BF16"):
        file.read("a", (2,))


def test_unaligned_data_is_copied_to_be_aligned(tmp_path: Path) -> None:
    header = json.dumps({"a": entry()}).encode()
    header += b" " * (3 - len(header) % 8)
    values = np.array([1.5, -2.0], "<f4")
    host = SafetensorsFile(write(tmp_path / "m.safetensors", header, values.tobytes())).read("a", (2,))
    assert host.data.flags.aligned
    np.testing.assert_array_equal(host.data, values)


@pytest.mark.parametrize("size", [0, 3, 8])
def test_file_shorter_than_a_header(size: int, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"\x01" * size)
    with pytest.raises(ModelError, match="longer than the file"):
        SafetensorsFile(tmp_path / "m.safetensors")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    make("llama", folder)
    return folder


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_model_error_or_loads(data: st.DataObject, checkpoint: Path, tmp_path: Path) -> None:
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    if data.draw(st.booleans(), "truncate"):
        # Mostly in the header, where the structure is.
        del content[data.draw(st.integers(0, len(content) - 1) | st.integers(0, header), "size") :]
    for _ in range(data.draw(st.integers(0, 4), "changes")):
        at = data.draw(st.integers(0, header + 16), "at")
        if at < len(content):
            content[at] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'0123456789{}[]",:F')), "byte")
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    try:
        loaded = opened(tmp_path)
        tree = build_params(loaded.spec, loaded.weights, lambda _, host: host.float32().sum())
    except ModelError:
        return
    assert tree


def test_host_tensor_of_bfloat16_bits() -> None:
    values = torch.tensor([1.0, -2.5, 3e38, float("inf")]).bfloat16()
    np.testing.assert_array_equal(HostTensor(bits(values), "bfloat16").float32(), values.float().numpy())
