"""Matrices of few bits that the compiled CPU kernels keep as the checkpoint has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from octavo.backends.cpu.native import variants
from octavo.core.backend import StepLimits
from octavo.core.models.spec import WeightFormat, model_params
from octavo.core.models.weights import QuantizedTensor
from octavo.testing import reference
from octavo.testing.kit import DeviceCase, Kit, Loaded
from octavo.testing.models import RandomWeights, tiny_spec
from octavo.testing.simulator import Simulator

Q8 = WeightFormat("Q8_0", 8, 32, False)
Q6 = WeightFormat("Q6_K", 8, 16, False)
Q4 = WeightFormat("Q4_K", 4, 32, True)
LIMITS = StepLimits(256, 4, 256, 16)


class Checkpoint:
    """Random weights, some of which are kept in few bits."""

    def __init__(self, model):
        self.formats = dict(model.weight_formats)

    def read(self, param):
        host = RandomWeights().read(param)
        kept = self.formats.get(param.path)
        if kept is None:
            return host
        groups = host.data.reshape(len(host.data), -1, kept.group)
        if kept.bits == 8:
            scale, least = np.abs(groups).max(-1) / 127, None
            numbers = np.rint(groups / scale[..., None])
        else:
            least = groups.min(-1)
            scale = (groups.max(-1) - least) / 15
            numbers = np.rint((groups - least[..., None]) / scale[..., None])
        half = lambda x: None if x is None else x.astype(np.float16).astype(np.float32)  # noqa: E731
        return QuantizedTensor(kept, numbers.astype(np.int8).reshape(host.data.shape), half(scale), half(least))


def spec(tied=False, **formats):
    """Layer 0 has one format for q, k and v, layer 1 has v in another; each kind of matrix by its last name."""
    model = tiny_spec(
        hidden_size=64, intermediate_size=96, head_dim=16, num_heads=4, num_kv_heads=2, tie_embeddings=tied
    )
    kept = {p.path: formats[name] for p in model_params(model) if (name := p.path.split(".")[-1]) in formats}
    if "layers.0.v" in kept:
        kept["layers.0.v"] = formats["q"]
    return replace(model, weight_formats=tuple(kept.items()))


MIXED = {"q": Q4, "k": Q4, "v": Q6, "o": Q8, "gate": Q4, "up": Q4, "down": Q6, "embed": Q8, "lm_head": Q6}


def load(model, **changes):
    kit = Kit(DeviceCase("cpu", options={"kernels": "native"}))
    backend = kit.create(**{"dtype": "auto", **changes})
    backend.load(model, Checkpoint(model))
    backend.init_cache(LIMITS, 40)
    return Loaded(backend, model, LIMITS, "float32", 40)


@pytest.fixture
def variant(native_library, monkeypatch):
    monkeypatch.setenv(variants.VARIABLE, native_library.variant)
    return native_library.variant


def check(loaded, variant, exact=False):
    model, source = loaded.model, Checkpoint(loaded.model)
    params = {p.path: source.read(p).data for p in model_params(model) if p.kind != "table"}
    text = np.random.default_rng(1).integers(0, model.vocab_size, 70)
    want = reference.decoder(model, lambda path: params[path].astype(np.float64), text)[-1]
    simulator = Simulator(loaded)
    stream = simulator.open()
    simulator.logits([(stream, text[:50].tolist())])
    simulator.logits([(stream, text[50:69].tolist())])
    got = simulator.logits([(stream, text[69:].tolist())])[0]
    error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    # Activations of 8 bits err by about 1/127/sqrt(12) of their group's peak, a dozen times in two layers.
    rounds = "vnni" in variant or "bf16" in variant
    assert error < (0.03 if rounds and not exact else 1e-5), error


@pytest.mark.parametrize(
    "model",
    [spec(**MIXED), spec(tied=True, **MIXED), spec(q=Q8, v=Q8, down=Q4), spec(gate=Q4, up=Q8, down=Q8)],
    ids=range(4),
)
def test_a_model_of_kept_matrices(variant, model):
    loaded = load(model)
    structs = [w.struct for layer in loaded.backend.params["layers"] for w in layer.weights.values()]
    assert {s.format for s in structs} & {3, 4}
    check(loaded, variant)


def test_bytes_are_counted_as_kept(variant):
    loaded = load(spec(**MIXED))
    plan = loaded.backend.memory(loaded.model, LIMITS)
    layers, params = loaded.backend.params["layers"], loaded.backend.params
    weights = [w for layer in layers for w in layer.weights.values()] + [params["embed"], params["lm_head"]]
    sizes = sum(sum(loaded.backend._library.sizes(w.struct)) for w in weights)
    assert plan.weights == sizes + 4 * (5 * 64 + 8)  # norms and the rotary table
    assert plan.weight_format == "Q4_K, Q6_K, Q8_0"
    assert "qkv" in layers[0].weights
    assert {"q", "k", "v"} <= layers[1].weights.keys()


def test_a_dtype_that_was_asked_for_is_taken(variant):
    loaded = load(spec(**MIXED), dtype="float32")
    assert {w.struct.format for layer in loaded.backend.params["layers"] for w in layer.weights.values()} == {0}
    check(loaded, variant, exact=True)


def test_numbers_are_kept_bit_by_bit(variant):
    """The embedding comes back as it was."""
    loaded = load(spec(**MIXED))
    embed = next(p for p in model_params(loaded.model) if p.path == "embed")
    ids = loaded.backend.from_host(np.arange(loaded.model.vocab_size, dtype=np.int32))
    got = loaded.backend.to_host(loaded.ops.embed(loaded.backend.params["embed"], ids))
    np.testing.assert_array_equal(got, Checkpoint(loaded.model).read(embed).data)
