"""The torch runtime's own choices: each path gives the same, whatever the tile size; nothing leaves the device."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from octavo.backends.cpu.backend import CpuBackend  # noqa: E402
from octavo.backends.cpu.onednn import can_pack  # noqa: E402
from octavo.backends.torch import plan as planning  # noqa: E402
from octavo.backends.torch import sampling  # noqa: E402
from octavo.backends.torch.attend import composed, flash, has_flash, merge  # noqa: E402
from octavo.backends.torch.dtypes import as_torch  # noqa: E402
from octavo.backends.torch.ops import TorchOps  # noqa: E402
from octavo.core.backend import BackendConfig, StepConstraints, StepLimits  # noqa: E402
from octavo.core.models.decoder import forward  # noqa: E402
from octavo.core.models.spec import weight_bytes  # noqa: E402
from octavo.core.models.weights import HostTensor  # noqa: E402
from octavo.core.ops import StepContext  # noqa: E402
from octavo.core.sampling import filters, rng  # noqa: E402
from octavo.core.step import map_arrays  # noqa: E402
from octavo.testing.batches import Part, Pool, Stream, build_step, step_shape  # noqa: E402
from octavo.testing.models import RandomWeights, tiny_spec  # noqa: E402

CPU = torch.device("cpu")
MODEL = tiny_spec(num_layers=1)
SIZE = 16
BATCH = [(300, 1), (0, 33), (90, 40), (5, 1), (70, 1), (17, 30)]

needs_flash = pytest.mark.skipif(not has_flash(CPU), reason="this torch has no fused kernel for CPUs")


def make_step(batch):
    pool, parts = Pool(80), []
    for slot, (context, new) in enumerate(batch):
        stream = Stream(slot, context)
        stream.reserve(context + new, SIZE, pool)
        parts.append(Part(stream, [1] * new))
    return build_step(parts, step_shape(parts, SIZE, StepConstraints()), SIZE, 8)


def run_attention(window, use_flash, tile_bytes, batch=BATCH, dtype=torch.float32):
    """Attention over a random cache: every slot holds something."""
    torch.manual_seed(0)
    ops = TorchOps(CPU)
    ops.use_flash = use_flash
    step = make_step(batch)
    inputs = map_arrays(torch.tensor, step.inputs)
    m = MODEL
    cache = torch.randn(2 * m.num_kv_heads, 80, SIZE, m.head_dim).to(dtype)
    q = torch.randn(step.shape.tokens, m.num_heads, m.head_dim).to(dtype)
    k, v = torch.randn(2, step.shape.tokens, m.num_kv_heads, m.head_dim).to(dtype)
    ctx = StepContext(m, step.shape, inputs, planning.Plan(inputs, tile_bytes), None, None)
    cache = ops.write_cache(cache, k, v, ctx)
    return ops.attention(q, k, v, cache, ctx, window)


@needs_flash
@pytest.mark.parametrize("window", [None, 7, 64, 1000])
def test_fused_and_composed_attention_are_equal(window):
    expected = run_attention(window, use_flash=True, tile_bytes=1 << 20, dtype=torch.float64)
    for use_flash in (True, False):
        for tile_bytes in (1, 1 << 15, 1 << 22):  # 16 tokens, a few sequences, everything
            out = run_attention(window, use_flash, tile_bytes)
            torch.testing.assert_close(out.double(), run_attention(window, True, 1 << 20).double(), rtol=0, atol=2e-6)
            out = run_attention(window, use_flash, tile_bytes, dtype=torch.float64)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", [None, 40])
def test_tiles_of_decoding_sequences(window):
    """Lengths from one to many tiles; also a single sequence, and all of one length."""
    for batch in ([(900, 1)], [(3, 1)] * 7, [(n, 1) for n in (700, 1, 40, 41, 39, 2, 0)]):
        outs = [run_attention(window, False, tile_bytes, batch) for tile_bytes in (1, 1 << 14, 1 << 22)]
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], rtol=0, atol=2e-6)


def test_tiles_are_bounded():
    inputs = map_arrays(torch.tensor, make_step([(n, 1) for n in (700, 1, 40, 41, 39, 2, 0)]).inputs)
    cache = torch.zeros(2 * MODEL.num_kv_heads, 80, SIZE, MODEL.head_dim)
    row = MODEL.head_dim * 4
    for tile_bytes in (1 << 14, 1 << 16):
        for group in planning.Plan(inputs, tile_bytes).groups(None, cache, torch.float32):
            assert all(tile.index.numel() * row <= tile_bytes for tile in group.tiles)


@needs_flash
def test_merging_halves_gives_the_whole():
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    k, v = (torch.cat([x, x.flip(2) * 0.5], dim=2) for x in (k, v))
    whole, whole_lse = flash(q, k, v, 0.3)
    for attend in (flash, lambda *a: composed(*a, need_lse=True)):
        out, lse = merge(*attend(q, k[:, :, :3], v[:, :, :3], 0.3), *attend(q, k[:, :, 3:], v[:, :, 3:], 0.3))
        torch.testing.assert_close(out, whole)
        torch.testing.assert_close(lse, whole_lse)


def test_threshold_is_that_of_core():
    """On random rows with ties: the same number, except where rounding of sums decides about top-p."""
    import array_api_compat.torch as xp

    generator = np.random.default_rng(0)
    x = np.round(generator.standard_normal((200, 700)) * 3, 1).astype(np.float32)
    x[::7, ::2] = -np.inf
    top_k = generator.choice([0, 1, 3, 255, 256, 257, 700, 9999], 200).astype(np.int32)
    top_p = generator.choice([1.0, 0.99, 0.7, 0.1], 200).astype(np.float32)
    min_p = generator.choice([0.0, 0.2], 200).astype(np.float32)
    arguments = [torch.tensor(a) for a in (x - x.max(1, keepdims=True), top_k, top_p, min_p)]
    ours, core = sampling.threshold(*arguments), filters.threshold(xp, *arguments)
    assert (ours == core).float().mean() > 0.98
    exact = torch.tensor(top_p) == 1
    assert torch.equal(ours[exact], core[exact])


def test_gumbel_is_that_of_core():
    import array_api_compat.torch as xp

    seed = torch.tensor([[1, 2], [-5, 7], [0, 0], [2**31 - 1, -(2**31)], [3, 4]], dtype=torch.int32)
    position = torch.tensor([0, 1, 2, 3, 99], dtype=torch.int32)
    assert torch.equal(sampling.gumbel(seed, position, 1000), rng.gumbel(xp, seed, position, 1000))


def test_host_tensors_become_torch_tensors_without_a_copy():
    bits = np.asarray([0x3F80, 0xC000, 0x7F80], np.uint16)
    bits.flags.writeable = False
    tensor = as_torch(HostTensor(bits, "bfloat16"))
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [1.0, -2.0, float("inf")]
    assert tensor.data_ptr() == bits.ctypes.data


def test_norm_is_rounded_before_the_weight():
    """As in Transformers: weight × (normalized values in 16 bits)."""
    torch.manual_seed(2)
    ops = TorchOps(CPU)
    x, w = torch.randn(50, 64).bfloat16() * 3, torch.randn(64).bfloat16()
    h = x.float()
    expected = w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(ops.rms_norm(x, w, 1e-5), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 20])
def test_nothing_leaves_the_device(dtype, window, monkeypatch):
    """Placement: the whole forward pass on meta tensors, where touching another device or a value is an error.

    Shows that arrays are made where the others are, as Metal needs it; not that Metal computes them.
    """
    model = tiny_spec(sliding_window=(window, window))
    monkeypatch.setattr("octavo.backends.cpu.backend.can_pack", lambda dtype: False)  # a layout for CPUs only
    backend = CpuBackend(BackendConfig("cpu", dtype=dtype))
    backend.load(model, RandomWeights())
    backend.init_cache(StepLimits(512, 8, 256, SIZE), 80)
    meta = torch.device("meta")
    ops = TorchOps(meta)
    host = make_step(BATCH)
    inputs = map_arrays(lambda a: torch.tensor(a, device=meta), host.inputs)

    class MetaOps(TorchOps):
        def plan(self, model, shape, given, cache):
            # Metadata is read on the host, once per step; on meta tensors there is nothing to read.
            made = planning.Plan(map_arrays(torch.tensor, host.inputs))
            made.slots, made._device = given.slot_mapping.long(), meta
            return made

    ops = MetaOps(meta)
    to_meta = lambda tree: torch.utils._pytree.tree_map(lambda t: t.to(meta), tree)  # noqa: E731
    params, cache = to_meta(backend.params), to_meta(tuple(backend.cache))
    cache = type(backend.cache)(*cache)
    cache, logits = forward(model, ops, host.shape, params, cache, inputs)
    assert logits.device == meta
    assert logits.shape == (len(BATCH), model.vocab_size)
    assert logits.dtype == torch.float32


@pytest.mark.skipif(not can_pack(torch.float32), reason="this torch cannot pack weights")
@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_change_nothing(tied, monkeypatch):
    model = tiny_spec(tie_embeddings=tied, qkv_bias=True)
    host = make_step(BATCH)
    outs = []
    for packing in (True, False):
        if not packing:
            monkeypatch.setattr("octavo.backends.cpu.backend.can_pack", lambda dtype: False)
        backend = CpuBackend(BackendConfig("cpu", dtype="float32"))
        backend.load(model, RandomWeights())
        limits = StepLimits(512, 8, 256, SIZE)
        backend.init_cache(limits, 80)
        inputs = map_arrays(backend.from_host, host.inputs)
        outs.append(forward(model, backend.ops, host.shape, backend.params, backend.cache, inputs)[1])
        assert backend.params["layers"][0]["qkv"].is_mkldnn == packing
        extra = model.vocab_size * model.hidden_size * 4 if tied and packing else 0
        assert backend.memory(model, limits).weights == weight_bytes(model, "float32") + extra
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=2e-5)


def test_bfloat16_is_not_packed_where_onednn_would_refuse_it(monkeypatch):
    """oneDNN raises for bfloat16 on a CPU that has only AVX2."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert not can_pack(torch.bfloat16)
    backend = CpuBackend(BackendConfig("cpu", dtype="bfloat16", options={"kernels": "torch"}))
    backend.load(MODEL, RandomWeights())
    assert not backend.params["layers"][0]["qkv"].is_mkldnn
