"""Workloads: rows of prompt token ids and a number of tokens to generate."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ConfigError


@dataclass(frozen=True)
class Row:
    """One request.

    Attributes:
        prompt_ids: the prompt.
        max_tokens: tokens to generate, exactly: end of sequence is ignored.
    """

    prompt_ids: list[int]
    max_tokens: int


def load(path: Path) -> list[Row]:
    """Reads JSONL with prompt_ids and max_tokens in each row; other fields are not used.

    Raises:
        ConfigError: the file cannot be read, or a row is malformed.
    """
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            row = Row([int(token) for token in found["prompt_ids"]], int(found["max_tokens"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: prompt_ids and max_tokens are needed ({error!r}).") from error
        if not row.prompt_ids or row.max_tokens < 1:
            raise ConfigError(f"{path}, line {number}: prompt_ids must not be empty, and max_tokens at least 1.")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{path} has no rows.")
    return rows


def synthetic(requests: int, input_len: int, output_len: int, seed: int, vocab_size: int) -> list[Row]:
    """Random tokens with lognormal lengths around the means, as chat traffic has; all of it follows from the seed."""
    draw = random.Random(seed)

    def length(mean: int, sigma: float) -> int:
        drawn = draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        return max(1, min(round(drawn), 5 * mean))

    sizes = [(length(input_len, 0.9), length(output_len, 0.8)) for _ in range(requests)]
    return [Row([draw.randrange(vocab_size) for _ in range(prompt)], output) for prompt, output in sizes]


def check_fits(rows: list[Row], max_model_len: int) -> None:
    """Raises ConfigError where a row is longer than the context."""
    longest = max(len(row.prompt_ids) + row.max_tokens for row in rows)
    if longest > max_model_len:
        raise ConfigError(
            f"The workload's longest row needs {longest} tokens, but the context is {max_model_len}. Choose a shorter "
            "workload, or raise --max-model-len."
        )
