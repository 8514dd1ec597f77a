"""The baseline of `octavo bench throughput`: Hugging Face Transformers with static batches, greedy.

A batch takes requests in their order, is left-padded to its longest prompt, and runs until its longest output is
done; only the tokens that were asked for are counted. Its libraries are imported when it runs.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from ...core.config import EngineConfig
from ...core.errors import ConfigError, ModelError
from ...core.hub import ModelFiles, resolve
from .workload import Row


def check(name: str, config: EngineConfig) -> None:
    """Raises ConfigError, before anything is loaded, where the baseline cannot run."""
    if name != "transformers":
        raise ConfigError(f"--baseline knows only transformers, not {name!r}.")
    for library in ("torch", "transformers"):
        try:
            importlib.import_module(library)
        except ImportError as error:
            raise ConfigError(f"--baseline transformers needs {library} ({error}); install it.") from error
    if config.device.partition(":")[0] not in ("auto", "cpu"):
        raise ConfigError("--baseline transformers runs on the CPU; compare with --device cpu.")


def measure(config: EngineConfig, dtype: str, rows: list[Row], batch: int) -> dict[str, Any]:
    """Runs the rows and returns wall time and rates.

    Args:
        config: names the model.
        dtype: weights and activations, as in the engine that it is compared with.
        rows: the workload.
        batch: requests per batch.

    Raises:
        ModelError: Transformers cannot read the model.
    """
    from .throughput import rates

    torch: Any = importlib.import_module("torch")
    model = _load(resolve(config.model, config.revision), dtype)
    pad = 0 if model.config.pad_token_id is None else model.config.pad_token_id
    model.generation_config.eos_token_id = None

    def generate(part: list[Row], tokens: int) -> None:
        width = max(len(row.prompt_ids) for row in part)
        fill = [width - len(row.prompt_ids) for row in part]
        model.generate(
            input_ids=torch.tensor([[pad] * n + row.prompt_ids for n, row in zip(fill, part, strict=True)]),
            attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in fill]),
            do_sample=False,
            max_new_tokens=tokens,
            pad_token_id=pad,
        )

    with torch.inference_mode():
        generate([Row(rows[0].prompt_ids[:8], 2)], 2)
        begin = time.perf_counter()
        for at in range(0, len(rows), batch):
            part = rows[at : at + batch]
            generate(part, max(row.max_tokens for row in part))
        wall = time.perf_counter() - begin
    found = rates(wall, sum(len(row.prompt_ids) for row in rows), sum(row.max_tokens for row in rows))
    version = importlib.import_module("transformers").__version__
    return {"version": version, "dtype": dtype, "batch": batch, **found}


def _load(files: ModelFiles, dtype: str) -> Any:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    where, more = str(files.path), {}
    if files.kind == "gguf":
        where, more = str(files.path.parent), {"gguf_file": files.path.name}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, dtype), **more)
    except Exception as error:  # it fails in many ways
        raise ModelError(f"Transformers cannot load {files.name}: {type(error).__name__}: {error}") from error
    return model.eval()
