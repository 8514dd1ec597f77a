"""Tiny random models of every family, saved by Transformers, on every backend: greedy output equals Transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3, "attention_bias": True, "num_key_value_heads": 1}),
    "mistral": ("MistralConfig", {"sliding_window": 21, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {}),
}
DEVICES = {
    "cpu": {"device": "cpu"},
    "reference": {"device": "reference"},
    "reference, float64": {"device": "reference", "dtype": "float64"},
    "static shapes": {"device": "reference", "backend_option": {"static": "1"}},
    "jax": {"device": "tpu", "backend_option": {"platform": "cpu"}},
    "jax, 2 devices": {"device": "tpu", "backend_option": {"platform": "cpu", "tensor_parallel": "2"}},
    "jax, 4 devices": {"device": "tpu", "backend_option": {"platform": "cpu", "tensor_parallel": "4"}},
}
CONDITIONS = {
    "roomy": {"kv_cache_memory": 32 << 20},
    "chunks": {"kv_cache_memory": 32 << 20, "max_num_batched_tokens": 19},
    "tight": {"num_blocks": 16},
    "tight, swap": {"num_blocks": 16, "swap_space": 4 << 20},
}


@pytest.fixture(scope="module", params=MODELS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object, list, list]:
    """A model's directory, the model in Transformers, prompts, and what its `generate` says to them."""
    transformers = pytest.importorskip("transformers")
    import torch

    config_class, extra = MODELS[request.param]
    torch.manual_seed(3)
    config = getattr(transformers, config_class)(**SHAPE | extra)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)  # spread the logits, so that ties are improbable
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 199, n).tolist() for n in (1, 3, 17, 30, 48, 64, 70, 90)]
    outputs = []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, use_cache=True)
        outputs.append(out[0, len(prompt) :].tolist())
    return path, model, prompts, outputs


# Programs are compiled anew for each test: most conditions are left to the slow tests.
QUICK = {"jax": ("tight, swap",), "jax, 2 devices": ("chunks",), "jax, 4 devices": ()}
RUNS = [
    pytest.param(d, c, marks=[] if c in QUICK.get(d, CONDITIONS) else [pytest.mark.slow])
    for d in DEVICES
    for c in CONDITIONS
]


@pytest.mark.parametrize(("device", "condition"), RUNS)
def test_greedy_tokens_equal_transformers(tiny: tuple, device: str, condition: str) -> None:
    path, _, prompts, expected = tiny
    if DEVICES[device]["device"] == "tpu":
        pytest.importorskip("jax")
    options = dict(CONDITIONS[condition])
    blocks = options.pop("num_blocks", None)
    if blocks:
        width = 8 if DEVICES[device].get("dtype") == "float64" else 4
        config = __import__("json").loads((path / "config.json").read_text())
        head_dim = config.get("head_dim") or 16
        heads = config["num_key_value_heads"]
        if DEVICES[device]["device"] == "tpu":  # where heads are 64 wide, and padded until they divide
            devices = int(DEVICES[device]["backend_option"].get("tensor_parallel", 1))
            heads, head_dim = -(-heads // devices) * devices, max(head_dim, 64)
        options["kv_cache_memory"] = blocks * 16 * 2 * 3 * heads * head_dim * width
        options["max_model_len"] = 140
    options = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 256} | options | DEVICES[device]
    with LLM(str(path), **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
        outputs = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
        assert outputs == expected
        if blocks:
            assert llm.stats().preemptions > 0
