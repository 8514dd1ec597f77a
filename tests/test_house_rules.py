"""Rule 1: core and server name no device, in no comparison, identifier or string (docstrings may give examples)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo

ROOT = Path(octavo.__file__).parent
# The benchmark's baseline is another engine, and it says where that one runs.
BASELINE = ROOT / "server/bench/transformers_baseline.py"
FILES = sorted({*ROOT.glob("core/**/*.py"), *ROOT.glob("server/**/*.py")} - {BASELINE})
DEVICES = re.compile(r"(?<![a-z])(cuda|rocm|hip|tpu|neuron|mps|xla|nvidia|amd|cpu)(?![a-z])", re.IGNORECASE)


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Identifiers and strings of the code, docstrings left out."""
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    docstrings = {id(value) for value in strings if isinstance(value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_device_is_named(path: Path) -> None:
    named = [(line, text) for line, text in texts(ast.parse(path.read_text())) if DEVICES.search(text)]
    assert not named


def test_the_search_finds_what_it_is_for() -> None:
    tree = ast.parse('def f(d):\n    "runs on cuda"\n    return d == "cuda" or torch.is_cuda()')
    assert {text for _, text in texts(tree) if DEVICES.search(text)} == {"cuda", "is_cuda"}
