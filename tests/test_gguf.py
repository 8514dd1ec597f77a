"""GGUF files: what the gguf package wrote comes back in Hugging Face's layout, and damage is an error, not a crash."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import TINY, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.core.errors import ModelError
from octavo.core.hub import ModelFiles
from octavo.core.models.families import family_for
from octavo.core.models.gguf_file import GGUFFile
from octavo.core.models.loader import LoadedModel, open_model
from octavo.core.models.spec import model_params
from octavo.core.models.weights import build_params

Kind = gguf.GGMLQuantizationType
# Largest difference that a type may make to values from -1 to 1: half a step of its coarsest block.
TOLERANCE = {"F32": 0.0, "F16": 5e-4, "BF16": 4e-3, "Q8_0": 5e-3, "Q5_0": 0.07, "Q4_1": 0.07, "Q4_0": 0.13}


def model(kind: str = "llama", **fields: Any) -> Any:
    classes = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}
    model_class, config_class = classes[kind]
    torch.manual_seed(0)
    made = model_class(config_class(**TINY, **fields))
    for parameter in made.parameters():
        torch.nn.init.uniform_(parameter, -1, 1)
    return made


def state_of(made: Any) -> dict[str, np.ndarray]:
    tied = made.config.tie_word_embeddings
    state = {name: value.detach().numpy() for name, value in made.state_dict().items()}
    return {name: value for name, value in state.items() if not (tied and name == "lm_head.weight")}


def opened(path: Path) -> LoadedModel:
    return open_model(ModelFiles("tiny", "gguf", path))


def read_all(loaded: LoadedModel, family: str) -> dict[str, np.ndarray]:
    names = family_for([family])
    return {
        names.checkpoint_name(param.path): loaded.weights.read(param).float32()
        for param in model_params(loaded.spec)
        if param.kind != "table"
    }


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
    ],
)
def test_every_tensor_is_in_hugging_face_layout(kind: str, arch: str, fields: dict[str, Any], tmp_path: Path) -> None:
    made = model(arch, **fields)
    state = state_of(made)
    loaded = opened(write_gguf(tmp_path / "m.gguf", state, arch=arch, kind=Kind[kind]))
    read = read_all(loaded, type(made).__name__)
    assert set(read) == set(state)
    for name, values in state.items():
        np.testing.assert_allclose(read[name], values, atol=TOLERANCE[kind], rtol=0, err_msg=name)
    assert loaded.spec.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")


def test_spec_comes_from_the_metadata(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<|eot|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "llama.attention.sliding_window": 32,
        "llama.rope.dimension_count": 64,
    }
    spec = opened(write_gguf(tmp_path / "m.gguf", state_of(model()), metadata=metadata)).spec
    assert (spec.family, spec.vocab_size, spec.num_layers, spec.head_dim) == ("llama", 64, 2, 64)
    assert (spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads) == (256, 512, 4, 2)
    assert (spec.max_position, spec.norm_eps) == (128, pytest.approx(1e-5))
    assert (spec.eos_token_ids, spec.bos_token_id, spec.freeable_window) == ((2, 3), 1, 32)


def half_precision(data: np.ndarray) -> float:
    return float(data.view(np.float16)[0])


def q4_k(block: np.ndarray) -> list[float]:
    """One Q4_K block of 144 bytes, from the description of block_q4_K in ggml-common.h, one value at a time."""
    scale, least = half_precision(block[0:2]), half_precision(block[2:4])
    packed, nibbles = [int(b) for b in block[4:16]], [int(b) for b in block[16:144]]
    values = []
    for sub in range(8):
        if sub < 4:
            sub_scale, sub_min = packed[sub] & 63, packed[sub + 4] & 63
        else:
            sub_scale = (packed[sub + 4] & 15) | (packed[sub - 4] >> 6 << 4)
            sub_min = (packed[sub + 4] >> 4) | (packed[sub] >> 6 << 4)
        for i in range(32):
            nibble = nibbles[sub // 2 * 32 + i]
            quant = nibble >> 4 if sub % 2 else nibble & 15
            values.append(scale * sub_scale * quant - least * sub_min)
    return values


def q6_k(block: np.ndarray) -> list[float]:
    """One Q6_K block of 210 bytes, from the description of block_q6_K in ggml-common.h, one value at a time."""
    low, high = [int(b) for b in block[:128]], [int(b) for b in block[128:192]]
    scales, scale = [int(b) for b in block[192:208].view(np.int8)], half_precision(block[208:210])
    values = []
    for i in range(256):
        half, within = divmod(i, 128)
        quarter, j = divmod(within, 32)
        byte = low[half * 64 + quarter % 2 * 32 + j]
        bits = (byte >> 4 if quarter >= 2 else byte & 15) | ((high[half * 32 + j] >> 2 * quarter & 3) << 4)
        values.append(scale * scales[i // 16] * (bits - 32))
    return values


@pytest.mark.parametrize(
    ("kind", "decode", "block_bytes", "halves"), [("Q4_K", q4_k, 144, (0, 2)), ("Q6_K", q6_k, 210, (208,))]
)
def test_k_quants(kind: str, decode: Any, block_bytes: int, halves: tuple[int, ...], tmp_path: Path) -> None:
    """The gguf package cannot make these, so blocks are random bytes, decoded here by hand."""
    state, rng = state_of(model()), np.random.default_rng(0)
    raw, expected = {}, {}
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        rows, columns = state[name].shape
        blocks = rng.integers(0, 256, (rows * columns // 256, block_bytes), dtype=np.uint8)
        for at in halves:
            scales = rng.uniform(-1, 1, len(blocks)).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
        raw[name] = blocks.reshape(rows, -1)
        expected[name] = np.array([decode(block) for block in blocks], np.float32).reshape(rows, columns)
    quantized = {name: state[name] for name in raw}
    plain = {name: value for name, value in state.items() if name not in raw}
    path = tmp_path / "m.gguf"
    # Two kinds in one file: the writer takes one at a time, so matrices outside `raw` go as F16 in a second call.
    write_gguf(path, {**plain, **quantized}, kind=Kind[kind], raw={**raw, **f32_as(kind, plain, rng, block_bytes)})
    read = read_all(opened(path), "LlamaForCausalLM")
    for name, values in expected.items():
        np.testing.assert_allclose(read[name], values, rtol=1e-5, atol=1e-5)


def f32_as(kind: str, state: dict[str, np.ndarray], rng: Any, block_bytes: int) -> dict[str, np.ndarray]:
    matrices = {name: value.shape for name, value in state.items() if value.ndim == 2}
    return {name: np.zeros((r, c // 256 * block_bytes), np.uint8) for name, (r, c) in matrices.items()}


def test_llama3_frequency_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    config = LlamaConfig(**TINY, rope_parameters=scaling)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10000.0 ** -(np.arange(0, 64, 2) / 64)
    path = write_gguf(tmp_path / "m.gguf", state_of(model()))
    add_tensor(path, "rope_freqs.weight", (plain / expected.numpy()).astype(np.float32))
    np.testing.assert_allclose(opened(path).spec.rope.inv_freq, expected.numpy(), rtol=1e-6)


def add_tensor(path: Path, name: str, values: np.ndarray) -> None:
    """Writes the file anew with one more tensor."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_rope_scaling_metadata(rope_type: str, tmp_path: Path) -> None:
    metadata = {
        "llama.rope.scaling.type": rope_type,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    spec = opened(write_gguf(tmp_path / "m.gguf", state_of(model()), metadata=metadata)).spec
    scaling = {"rope_type": rope_type, "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    config = LlamaConfig(**TINY, rope_parameters=scaling)
    expected, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    np.testing.assert_allclose(spec.rope.inv_freq, expected.numpy(), rtol=1e-6)
    assert spec.rope.attention_factor == pytest.approx(factor)


def test_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    metadata = {"a.strings": ["x", "é", ""], "a.ints": [1, -2], "a.floats": [0.5, 1.5], "a.flag": True, "a.text": "ß"}
    path = write_gguf(tmp_path / "m.gguf", state_of(model()), kind=Kind.Q8_0, metadata=metadata)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in ours.metadata.items()}
    assert plain == fields
    assert {t.name for t in theirs.tensors} == set(ours.tensors)
    for tensor in theirs.tensors:
        place = ours.tensors[tensor.name]
        assert place.type == tensor.tensor_type
        assert place.shape == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(ours.raw(place).reshape(-1), tensor.data.reshape(-1).view(np.uint8))


@pytest.mark.parametrize(
    ("metadata", "drop", "what"),
    [
        ({"llama.expert_count": 8}, (), "mixture of experts"),
        ({"split.count": 2}, (), "llama-gguf-split --merge"),
        ({"llama.block_count": 3}, (), "block_count is 3"),
        ({"llama.block_count": 1}, (), "block_count is 1"),
        ({"llama.block_count": 4_000_000_000}, (), "block_count"),
        ({"llama.attention.head_count": 3}, (), "num_attention_heads"),
        ({"llama.attention.head_count_kv": [2, 1]}, (), "head_count_kv differs between layers"),
        ({"llama.rope.dimension_count": 32}, (), "rope.dimension_count"),
        ({"llama.rope.scaling.type": "longrope"}, (), "'longrope'"),
        ({"llama.attention.sliding_window": -0.5}, (), "sliding_window"),
        ({"llama.embedding_length": "wide"}, (), "hidden_size is 'wide'"),
        ({}, ("llama.context_length",), r"llama.context_length is missing"),
    ],
)
def test_refuses_and_says_why(metadata: dict[str, Any], drop: tuple[str, ...], what: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", state_of(model()), metadata=metadata, drop=drop)
    with pytest.raises(ModelError, match=what):
        opened(path)


def test_per_layer_values_that_are_equal_are_fine(tmp_path: Path) -> None:
    metadata = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [512, 512]}
    spec = opened(write_gguf(tmp_path / "m.gguf", state_of(model()), metadata=metadata)).spec
    assert (spec.num_kv_heads, spec.intermediate_size) == (2, 512)


def test_unsupported_architecture(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'gemma' is not supported. Supported: llama, qwen2"):
        opened(write_gguf(tmp_path / "m.gguf", state_of(model()), arch="gemma"))


def test_type_that_cannot_be_dequantized_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", state_of(model()))
    loaded = opened(path)
    content = path.read_bytes()
    at = content.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    path.write_bytes(content[:at] + struct.pack("<I", Kind.I32) + content[at + 4 :])
    with pytest.raises(ModelError, match=r"token_embd.weight is stored as I32.*Q8_0"):
        opened(path).weights.read(next(model_params(loaded.spec)))
    path.write_bytes(content[:at] + struct.pack("<I", 999) + content[at + 4 :])
    with pytest.raises(ModelError, match=r"token_embd.weight has the unknown type 999"):
        opened(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "too short"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
        # An array that claims 2^60 elements: a reader that believes it never ends.
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 0, 1 << 60),
            "middle of its header",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<II", 99, 0) + bytes(9), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture is missing"),
    ],
)
def test_file_that_is_not_a_model(content: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=what):
        opened(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_truncated_file_says_so(keep: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", state_of(model()))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ModelError, match=r"ends beyond the file's .* bytes.*download it again"):
        opened(path)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tokens = ["<unk>", "<s>", "</s>", *map(chr, range(97, 123))]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 26,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
    }
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    return write_gguf(path, state_of(model()), kind=Kind.Q4_0, metadata=metadata).read_bytes()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_model_error_or_loads(data: st.DataObject, small_file: bytes, tmp_path: Path) -> None:
    content = bytearray(small_file)
    header = content.index(b"token_embd.weight") + 2000
    if data.draw(st.booleans(), "truncate"):
        del content[data.draw(st.integers(0, len(content) - 1) | st.integers(0, header), "size") :]
    for _ in range(data.draw(st.integers(0, 5), "changes")):
        at = data.draw(st.integers(0, header), "at")
        if at < len(content):
            content[at] = data.draw(st.integers(0, 255), "byte")
    (tmp_path / "m.gguf").write_bytes(content)
    try:
        loaded = opened(tmp_path / "m.gguf")
        assert build_params(loaded.spec, loaded.weights, lambda _, host: host.data.nbytes)
        if loaded.tokenizer is not None:
            loaded.tokenizer.encode("abc")
    except ModelError:
        return


@pytest.mark.demo
def test_demo_model_equals_transformers(demo_model: ModelFiles) -> None:
    pytest.importorskip("accelerate", reason="Transformers reads GGUF weights only with accelerate")
    theirs = AutoModelForCausalLM.from_pretrained(
        demo_model.path.parent, gguf_file=demo_model.path.name, dtype=torch.float32
    )
    loaded = open_model(demo_model)
    state = theirs.state_dict()
    read = read_all(loaded, "LlamaForCausalLM")
    assert set(read) == set(state) - {"lm_head.weight"}
    for name, values in read.items():
        np.testing.assert_array_equal(values, state[name].numpy(), err_msg=name)
    np.testing.assert_allclose(loaded.spec.rope.inv_freq, theirs.model.rotary_emb.inv_freq.numpy(), rtol=3e-7)
    assert loaded.spec.tie_embeddings
