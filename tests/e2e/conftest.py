"""The demo model in Transformers, as the independent reference, and prompts of many lengths."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass

import numpy as np
import pytest

from octavo.core.hub import ModelFiles
from octavo.core.models.loader import open_model

NEW_TOKENS = 64
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 33, 64, 100, 129, 255, 300, 512, 777, 1024, 1500, 2000)


@dataclass
class Reference:
    """What Transformers says.

    Attributes:
        prompts: token ids, of LENGTHS.
        model: the Transformers model, float32.
    """

    prompts: list[list[int]]
    model: object

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float32 [tokens, vocabulary] of one forward pass."""
        import torch

        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].numpy()

    def check_greedy(self, prompt: list[int], output: list[int]) -> None:
        """Asserts that each output token is the arg-max after the ones before it: greedy decoding, at once."""
        logits = self.logits(prompt + output)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == output


@pytest.fixture(scope="session")
def reference(demo_model: ModelFiles) -> Reference:
    """The demo model in Transformers' own GGUF reader, so not even the weights come through Octavo's code."""
    transformers = pytest.importorskip("transformers")
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(demo_model.path.parent), gguf_file=demo_model.path.name, dtype=torch.float32
    ).eval()
    text = "\n".join(pydoc_data.topics.topics[k] for k in sorted(pydoc_data.topics.topics))
    tokenizer = open_model(demo_model).tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text[:200_000])
    rng = np.random.default_rng(7)
    prompts = []
    for length in LENGTHS:
        start = int(rng.integers(0, len(ids) - length))
        prompts.append(ids[start : start + length])
    return Reference(prompts, model)
