"""The compiled CPU kernels, each variant that this processor can run, against float64."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from octavo.backends.cpu import CpuFactory  # noqa: E402
from octavo.backends.cpu.cpuinfo import CpuInfo, cpu_info  # noqa: E402
from octavo.backends.cpu.native import library as native  # noqa: E402
from octavo.backends.cpu.native import variants  # noqa: E402
from octavo.backends.cpu.native.memory import Arena  # noqa: E402
from octavo.backends.cpu.native.weights import PackedWeight, Storage  # noqa: E402
from octavo.core.backend import BackendConfig, StepLimits  # noqa: E402
from octavo.core.errors import ConfigError, DeviceError  # noqa: E402
from octavo.core.models.spec import weight_bytes  # noqa: E402
from octavo.core.step import Step, StepShape, dummy_step  # noqa: E402
from octavo.testing import reference  # noqa: E402
from octavo.testing.kit import DeviceCase, Kit  # noqa: E402
from octavo.testing.models import tiny_spec  # noqa: E402
from octavo.testing.numbers import assert_close  # noqa: E402
from octavo.testing.simulator import Simulator  # noqa: E402

CANARY = -12345.0
EPSILON = 2.0**-24
STORAGES = [
    Storage("float32"),
    Storage("bfloat16"),
    Storage("float16"),
    Storage("float32", "int8"),
    Storage("float32", "int4"),
]


@pytest.fixture(scope="module")
def library(native_library):
    return native_library


def test_the_kernels_were_built():
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    assert variants.find_library(cpu_info()) is not None


def packed(library, storage, matrix):
    weight = PackedWeight(library, storage.struct(*matrix.shape, False), Arena())
    library.pack(weight.reference, 0, 0, len(matrix), matrix.ctypes.data, 0)
    return weight


def rows(library, weight, ids):
    ids = torch.tensor(ids, dtype=torch.int32)
    out = torch.empty(len(ids), weight.shape[1])
    library.rows(weight.reference, native.address(ids), len(ids), native.address(out))
    return out.numpy()


def rounded(library, weight, x):
    """Activations as the products round them, float64: to bfloat16, or groups of 32 (or as many as the weights' groups
    have) to 127 steps of their own."""
    bits = library.activation_bits(weight.struct)
    if bits == 16:
        return torch.from_numpy(x).bfloat16().double().numpy()
    if bits == 32:
        return x.astype(np.float64)
    groups = x.reshape(len(x), -1, 16 if weight.struct.group == 16 else 32)
    peak = np.abs(groups).max(-1, keepdims=True)
    scale = peak / np.float32(127)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    return (np.rint(groups.astype(np.float64) * inverse) * scale).reshape(x.shape)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (33, 96), (40, 576), (200, 288), (64, 1536)])
def test_products(library, storage, n, k):
    """All row counts to 30, and some that are cut into tasks; nothing is written beyond the result.

    Sums of k products of unit variance, added one after another: sqrt(k) roundings at size sqrt(k), four deviations.
    """
    rng = np.random.default_rng(n * k)
    weight = packed(library, storage, rng.standard_normal((n, k)).astype(np.float32))
    if storage.dtype != "float32":
        weight.bias[:] = torch.from_numpy(rng.standard_normal(n).astype(np.float32))
    exact = rows(library, weight, range(n)).astype(np.float64)
    for m in (*range(1, 31), 119, 120, 121, 250):
        x = rng.standard_normal((m, k)).astype(np.float32)
        out = torch.full((m * n + 64,), CANARY)
        library.linear(weight.reference, x.ctypes.data, m, native.address(out))
        expected = rounded(library, weight, x) @ exact.T + (weight.bias.numpy() if weight.struct.bias else 0)
        np.testing.assert_allclose(out[: m * n].numpy().reshape(m, n), expected, rtol=0, atol=4 * EPSILON * k + 2e-5)
        assert (out[m * n :] == CANARY).all()


def test_odd_widths(library):
    for storage in STORAGES[:4]:
        matrix = np.random.default_rng(0).standard_normal((7, 45)).astype(np.float32)
        weight = packed(library, storage, matrix)
        x = np.random.default_rng(1).standard_normal((3, 45)).astype(np.float32)
        out = torch.empty(3, 7)
        library.linear(weight.reference, x.ctypes.data, 3, native.address(out))
        expected = rounded(library, weight, x) @ rows(library, weight, range(7)).astype(np.float64).T
        np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=2e-5)


def test_numbers_are_kept_to_the_nearest(library):
    """16-bit formats as torch rounds them; int8 to half of a step, int4 to half of a step of its group."""
    matrix = np.random.default_rng(3).standard_normal((50, 64)).astype(np.float32)
    matrix[0] = 0
    for storage in STORAGES:
        got = rows(library, packed(library, storage, matrix), range(50))
        if storage.quantization is None:
            want = torch.from_numpy(matrix).to(getattr(torch, storage.dtype)).float().numpy()
            np.testing.assert_array_equal(got, want)
            continue
        groups = matrix.reshape(50, -1, 64 if storage.quantization == "int8" else 32)
        if storage.quantization == "int8":
            step = np.abs(groups).max(-1) / 127
        else:
            step = (groups.max(-1) - groups.min(-1)) / 15
        # The scale, and the least value, are float16 themselves.
        slack = step / 2 * 1.01 + np.abs(groups).max(-1) * 2.0**-10
        assert (np.abs(got.reshape(groups.shape) - groups) <= slack[..., None]).all()


@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_sixteen_bit_sources(library, source):
    matrix = torch.randn(40, 64, dtype=getattr(torch, source))
    for storage in STORAGES[:3]:
        weight = PackedWeight(library, storage.struct(40, 64, False), Arena())
        library.pack(weight.reference, 0, 0, 40, matrix.data_ptr(), {"bfloat16": 1, "float16": 2}[source])
        want = matrix.to(getattr(torch, storage.dtype)).float().numpy()
        np.testing.assert_array_equal(rows(library, weight, range(40)), want)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_team_does_every_task_once_with_any_number_of_threads(library, threads):
    """Thousands of short phases, with pauses in which threads fall asleep; more threads than cores."""
    team = native.Library(library.variant, variants.find_library_of(library.variant), threads)
    rng = np.random.default_rng(0)
    weight = packed(team, STORAGES[0], rng.standard_normal((300, 64)).astype(np.float32))
    x = rng.standard_normal((5, 64)).astype(np.float32)
    expected = x.astype(np.float64) @ rows(team, weight, range(300)).astype(np.float64).T
    for turn in range(3000):
        out = torch.full((5, 300), CANARY)
        team.linear(weight.reference, x.ctypes.data, 5, native.address(out))
        if turn % 500 == 0:
            np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=2e-5)
        assert not (out == CANARY).any()
    team.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": (24, 24)},
        {"sliding_window": (None, 20), "qkv_bias": True, "activation": "gelu_tanh"},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "activation": "gelu"},
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 20, "intermediate_size": 83},
        {"num_heads": 4, "num_kv_heads": 1, "tie_embeddings": True},
    ],
    ids=str,
)
def test_models_on_each_variant(library, monkeypatch, changes):
    """Chunks, then tokens one by one, with a context long enough to be split."""
    monkeypatch.setenv(variants.VARIABLE, library.variant)
    model = tiny_spec(**changes)
    loaded = Kit(DeviceCase("cpu", options={"kernels": "native", "threads": "2"})).load(
        model, StepLimits(1600, 4, 1600, 16), 300
    )
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, model.vocab_size, n) for n in (1500, 70, 3)]
    expected = [reference.decoder(model, loaded.parameter, text) for text in texts]
    simulator = Simulator(loaded)
    streams = [simulator.open() for _ in texts]
    for low, high in ((0, 0.5), (0.5, 1)):
        cuts = [(int(len(t) * low), max(int(len(t) * high), 1) if high < 1 else len(t) - 1) for t in texts]
        work = [(s, t[a:b].tolist()) for s, t, (a, b) in zip(streams, texts, cuts, strict=True) if b > a]
        simulator.logits(work)
    logits = simulator.logits([(s, t[-1:].tolist()) for s, t in zip(streams, texts, strict=True)])
    for row, want in zip(logits, expected, strict=True):
        assert_close(row, want[-1], "float32", 32, "the last token")


def test_steps_may_take_turns(library, monkeypatch):
    """The library keeps how one step's attention is cut; another's must not be taken for it."""
    monkeypatch.setenv(variants.VARIABLE, library.variant)
    loaded = Kit(DeviceCase("cpu", options={"kernels": "native"})).load(tiny_spec(), StepLimits(64, 4, 64, 16), 8)
    rng = np.random.default_rng(0)
    m = loaded.local
    loaded.write(np.arange(16, 64), *rng.standard_normal((2, 48, m.num_kv_heads, m.head_dim)))
    q, steps = loaded.array(rng.standard_normal((1, m.num_heads, m.head_dim))), []
    for length in (40, 3):
        step = dummy_step(StepShape(1, 1, 3, 1, True), 4, 1)
        inputs = step.inputs._replace(
            seq_lens=np.asarray([length], np.int32), block_tables=np.asarray([[1, 2, 3]], np.int32)
        )
        steps.append(loaded.context(Step(step.shape, inputs)))
    long, short, again = (
        loaded.numpy(loaded.ops.attention(q, None, None, loaded.layer_cache(0), steps[i], None)) for i in (0, 1, 0)
    )
    np.testing.assert_array_equal(again, long)
    assert np.abs(long - short).max() > 0.1


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("head_dim", [16, 20])
def test_a_cache_of_8_bits(library, monkeypatch, head_dim, window):
    """Attention over keys and values as they are kept: each with a scale of its own. Whatever lies in slots that are
    not seen does not matter."""
    monkeypatch.setenv(variants.VARIABLE, library.variant)
    model, length = tiny_spec(head_dim=head_dim), 70
    kit = Kit(DeviceCase("cpu", options={"kernels": "native"}))
    loaded = kit.load(model, StepLimits(96, 4, 96, 16), 8, kv_dtype="int8")
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((2, 96, model.num_kv_heads, head_dim)) * rng.uniform(0.01, 9, (2, 96, 1, 1))
    kv[:, 3] = 0
    kv[:, length:] = np.nan
    loaded.write(np.arange(16, 112), *kv)
    q = rng.standard_normal((1, model.num_heads, head_dim))
    step = dummy_step(StepShape(1, 1, 6, 1, True), 4, 1)
    inputs = step.inputs._replace(
        seq_lens=np.asarray([length], np.int32), block_tables=np.arange(1, 7, dtype=np.int32)[None]
    )
    context = loaded.context(Step(step.shape, inputs))
    got = loaded.numpy(loaded.ops.attention(loaded.array(q), None, None, loaded.layer_cache(0), context, window))[0]
    low = 0 if window is None else length - window
    kept = kv[:, low:length]
    scale = np.abs(kept).max(-1, keepdims=True) / 127
    kept = np.divide(kept, scale, out=np.zeros_like(kept), where=scale > 0).round() * scale
    group = model.num_heads // model.num_kv_heads
    for head in range(model.num_heads):
        keys, values = kept[:, :, head // group]
        scores = keys @ q[0, head] * model.scale
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(got[head], weights @ values / weights.sum(), rtol=0, atol=2e-5)


def test_blocks_of_8_bits_are_moved_whole(library, monkeypatch):
    """Numbers, scales and all; `memory` counts both."""
    monkeypatch.setenv(variants.VARIABLE, library.variant)
    kit, limits = Kit(DeviceCase("cpu", options={"kernels": "native"})), StepLimits(96, 4, 96, 16)
    loaded = kit.load(tiny_spec(head_dim=20), limits, 8, kv_dtype="int8")
    loaded.write(np.arange(16, 48), *np.random.default_rng(0).standard_normal((2, 32, loaded.local.num_kv_heads, 20)))
    contents = loaded.backend.export_blocks(np.asarray([1, 2], np.int32))
    assert contents.shape[1] == loaded.backend.memory(loaded.model, limits).block_bytes
    assert len(np.unique(contents, axis=0)) == 2
    loaded.backend.import_blocks(np.asarray([5, 4], np.int32), contents)
    np.testing.assert_array_equal(loaded.backend.export_blocks(np.asarray([5, 4], np.int32)), contents)


def test_threads_are_torchs_too(library, monkeypatch):
    monkeypatch.setenv(variants.VARIABLE, library.variant)
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            CpuFactory().create(BackendConfig("cpu", options={"threads": str(count)}))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_kernels_that_cannot_be_loaded_say_what_else_to_do(monkeypatch, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setattr("octavo.backends.cpu.find_library", lambda info: ("avx2", tmp_path / "broken.so"))
    with pytest.raises(DeviceError, match=r"cannot be loaded.*kernels=torch"):
        CpuFactory().create(BackendConfig("cpu"))


def test_the_best_variant_that_fits_is_taken(tmp_path, monkeypatch):
    monkeypatch.delenv(variants.VARIABLE, raising=False)
    fast = CpuInfo("x", 2, (), variants.VARIANTS["avx512"] | variants.VARIANTS["avx2"])
    slow = CpuInfo("x", 2, ())
    assert variants.find_library(fast, tmp_path) is None
    for variant in variants.VARIANTS:
        (tmp_path / f"_{variant}.cpython-311.so").touch()
    assert variants.find_library(fast, tmp_path)[0] == "avx512"
    assert variants.find_library(slow, tmp_path)[0] == "baseline"
    monkeypatch.setenv(variants.VARIABLE, "avx2")
    assert variants.find_library(fast, tmp_path)[0] == "avx2"
    with pytest.raises(ConfigError, match="lacks its instructions"):
        variants.find_library(slow, tmp_path)
    (tmp_path / "_avx2.cpython-311.so").unlink()
    with pytest.raises(ConfigError, match="not built"):
        variants.find_library(fast, tmp_path)
    monkeypatch.setenv(variants.VARIABLE, "mmx")
    with pytest.raises(ConfigError, match="must be one of"):
        variants.find_library(fast, tmp_path)


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({"kernels": "fast"}, "auto", "must be native or torch"),
        ({"quantization": "int2"}, "auto", "must be int8 or int4"),
        ({"kernels": "torch", "quantization": "int8"}, "auto", "does not go with kernels=torch"),
        ({"kernels": "native"}, "float64", "nor with float64"),
    ],
)
def test_senseless_options_are_refused(options, dtype, message):
    with pytest.raises(ConfigError, match=message):
        CpuFactory().create(BackendConfig("cpu", dtype, options=options))


def test_quantization_needs_compiled_kernels(monkeypatch):
    monkeypatch.setattr("octavo.backends.cpu.find_library", lambda info: None)
    assert "none were built" in CpuFactory().probe().devices[0].details["kernels"]
    with pytest.raises(ConfigError, match="needs compiled kernels"):
        CpuFactory().create(BackendConfig("cpu", options={"quantization": "int8"}))


def test_a_library_of_other_sources_is_refused(library, monkeypatch):
    monkeypatch.setattr(native, "ABI", 0)
    with pytest.raises(ImportError, match="install the package again"):
        native.Library(library.variant, variants.find_library_of(library.variant), 1)


def test_structs_are_as_large_as_in_c(library):
    """A field too many on one side would shift all that follow."""
    assert ctypes.sizeof(native.Weight) == 16 + 3 * 8
    assert ctypes.sizeof(native.Layer) == 2 * 8 + 6 * ctypes.sizeof(native.Weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_keep_the_width_of_their_checkpoint(library, monkeypatch, dtype):
    """And `memory` counts them exactly."""
    monkeypatch.setenv(variants.VARIABLE, library.variant)
    backend = CpuFactory().create(BackendConfig("cpu", options={"kernels": "native"}))
    model = tiny_spec(dtype=dtype, hidden_size=64, intermediate_size=128, vocab_size=256, head_dim=16, num_heads=4)
    assert backend.pick_dtype(model) == dtype
    plan = backend.memory(model, StepLimits(64, 4, 64, 16))
    assert plan.weights == weight_bytes(model, dtype) + (0 if dtype == "float32" else 2 * (5 * 64))  # norms are float32
