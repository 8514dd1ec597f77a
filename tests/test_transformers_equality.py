"""The decoder on each device against Transformers' own models with the same weights."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from octavo.core.backend import StepLimits  # noqa: E402
from octavo.core.models.families.llama import LLAMA  # noqa: E402
from octavo.core.models.families.mistral import MISTRAL  # noqa: E402
from octavo.core.models.families.qwen2 import QWEN2  # noqa: E402
from octavo.core.models.weights import HostTensor  # noqa: E402
from octavo.testing.kit import Loaded  # noqa: E402
from octavo.testing.numbers import assert_close  # noqa: E402
from octavo.testing.simulator import Simulator  # noqa: E402

SIZES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": (LLAMA, transformers.LlamaConfig, {}),
    "llama, wide heads, biases": (LLAMA, transformers.LlamaConfig, {"head_dim": 32, "attention_bias": True}),
    "llama 3 rope, tied": (
        LLAMA,
        transformers.LlamaConfig,
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "mistral": (MISTRAL, transformers.MistralConfig, {"sliding_window": 24}),
    "qwen2": (
        QWEN2,
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
}
LIMITS = StepLimits(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=128, block_size=16)


class TransformersWeights:
    """A weight source over a Transformers model."""

    def __init__(self, family, model):
        self._family = family
        self._state = model.state_dict()

    def read(self, param):
        values = self._state[self._family.checkpoint_name(param.path)].numpy()
        assert values.shape == param.shape
        return HostTensor(values, str(values.dtype))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(kit, name):
    if kit.dtype not in ("float32", "float64"):
        pytest.skip("Transformers rounds elsewhere in 16 bits")
    family, config_class, changes = MODELS[name]
    torch.manual_seed(0)
    config = config_class(**SIZES, **changes, attn_implementation="eager")
    theirs = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, kit.dtype)).eval()
    for parameter in theirs.parameters():
        # Norms and biases start as ones and zeros, which would hide a mistake with them.
        parameter.data += 0.05 * torch.randn_like(parameter)
    spec = family.spec(config.to_dict())
    backend = kit.create()
    constraints = backend.constraints(spec, LIMITS)
    backend.load(spec, TransformersWeights(family, theirs))
    backend.init_cache(LIMITS, 40)
    simulator = Simulator(Loaded(backend, spec, LIMITS, kit.dtype, 40), constraints)

    rng = np.random.default_rng(1)
    texts = [rng.integers(0, spec.vocab_size, n) for n in (90, 31)]
    with torch.no_grad():
        expected = [theirs(torch.tensor(text)[None]).logits[0].double().numpy() for text in texts]
    streams = [simulator.open() for _ in texts]
    while work := [
        (stream, text[stream.length : stream.length + int(rng.choice([1, 7, 30]))].tolist())
        for stream, text in zip(streams, texts, strict=True)
        if stream.length < len(text)
    ]:
        for (stream, _), row in zip(work, simulator.logits(work), strict=True):
            # Transformers computes norms and rotary angles in float32 even for float64 models.
            assert_close(row, expected[stream.slot][stream.length - 1], "float32", 32, f"{stream.length} tokens")
