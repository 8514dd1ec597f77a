"""Writes the workloads W1 to W5 as JSONL, one file per workload and repeat.

    python workload.py --tokenizer MODEL_DIR --out DIR [--repeats 5] [--seed 0] [--text FILE ...]

Lengths and arrivals follow from the seed alone; each repeat has other text, so that no prefix cache carries work
from one repeat to the next. Text is the running Python's language reference and its standard library's docstrings,
or the files of --text. A row has "id", "prompt", "prompt_ids" (to which the prompt encodes exactly, without special
tokens), "max_tokens" and "arrival", in units of the mean gap. Needs: tokenizers, numpy.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

W1_REQUESTS, W3_REQUESTS, W4_REQUESTS = 64, 32, 60
W3_SHARED, W3_OWN, W3_OUTPUT = 512, 32, 32
Piece = tuple[str, list[int]]


def python_docs() -> Iterator[str]:
    """The language reference, then docstrings of some length."""
    yield from pydoc_data.topics.topics.values()
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = sorted(s for s in subfolders if s not in ("site-packages", "test", "tests", "lib2to3"))
        for name in sorted(n for n in names if n.endswith(".py")):
            try:
                tree = ast.parse(Path(folder, name).read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue
            nodes = (n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)))
            yield from (doc for doc in map(ast.get_docstring, nodes) if doc and len(doc) > 200)


class Text:
    """Hands out pieces of a text with an exact number of tokens, no two with the same beginning."""

    def __init__(self, tokenizer: Tokenizer, text: str, rng: np.random.Generator) -> None:
        self.tokenizer, self.rng = tokenizer, rng
        self.ids = self.encode(text)
        self.begun = np.zeros(len(self.ids), bool)

    def encode(self, text: str) -> list[int]:
        """Token ids, without special ones."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def take(self, tokens: int) -> Piece:
        """A piece that no other begins near."""
        for _ in range(10_000):
            start = int(self.rng.integers(0, len(self.ids) - tokens))
            if self.begun[max(0, start - 64) : start + 64].any():
                continue
            text = self.tokenizer.decode(self.ids[start : start + tokens], skip_special_tokens=False)
            ids = self.encode(text)
            if len(ids) == tokens and "\ufffd" not in text and text[0] == " ":
                self.begun[start] = True
                return text, ids
        raise SystemExit("The text is too short for these workloads; give more with --text.")


def row(piece: Piece, max_tokens: int, arrival: float = 0.0) -> dict[str, Any]:
    """One request."""
    return {"prompt": piece[0], "prompt_ids": piece[1], "max_tokens": int(max_tokens), "arrival": float(arrival)}


def chat_lengths(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens as chat traffic has them: lognormal, clipped."""

    def draw(mean: float, sigma: float, low: int, high: int) -> np.ndarray:
        return np.clip(np.rint(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)), low, high).astype(int)

    return list(zip(draw(210, 0.9, 16, 1024).tolist(), draw(105, 0.8, 8, 256).tolist(), strict=True))


def workloads(text: Text, seed: int) -> dict[str, list[dict[str, Any]]]:
    """One repeat."""
    rng = np.random.default_rng(seed)
    w5 = [row(text.take(4096), 1)]
    w1 = [row(text.take(prompt), output) for prompt, output in chat_lengths(rng, W1_REQUESTS)]
    arrivals = np.cumsum(rng.exponential(1.0, W4_REQUESTS))
    lengths = chat_lengths(rng, W4_REQUESTS)
    w4 = [row(text.take(p), o, at - arrivals[0]) for (p, o), at in zip(lengths, arrivals, strict=True)]
    w2 = [row(text.take(128), 256)]
    shared, w3 = text.take(W3_SHARED), []
    while len(w3) < W3_REQUESTS:
        own = text.take(W3_OWN)
        both = (shared[0] + own[0], shared[1] + own[1])
        if text.encode(both[0]) == both[1]:
            w3.append(row(both, W3_OUTPUT))
    return {"W1": w1, "W2": w2, "W3": w3, "W4": w4, "W5": w5}


def main() -> None:
    """Writes the files, and says what the first repeat holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="directory with tokenizer.json")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", nargs="*", type=Path, help="text files to draw prompts from")
    args = parser.parse_args()
    parts = (path.read_text(encoding="utf-8") for path in args.text) if args.text else python_docs()
    tokenizer = Tokenizer.from_file(os.path.join(args.tokenizer, "tokenizer.json"))
    text = Text(tokenizer, "\n\n".join(parts), np.random.default_rng(args.seed + 1))
    args.out.mkdir(parents=True, exist_ok=True)
    for repeat in range(args.repeats):
        for name, rows in workloads(text, args.seed).items():
            lines = (json.dumps({"id": f"{name}-r{repeat}-{i}", **r}) + "\n" for i, r in enumerate(rows))
            (args.out / f"{name}-r{repeat}.jsonl").write_text("".join(lines), encoding="utf-8")
            if repeat == 0:
                prompts, outputs = [len(r["prompt_ids"]) for r in rows], [r["max_tokens"] for r in rows]
                print(f"{name}: {len(rows)} requests, {sum(prompts)} prompt and {sum(outputs)} output tokens")


if __name__ == "__main__":
    main()
