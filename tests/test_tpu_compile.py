"""The gate of `ci/tpu_compile.py`, for kinds of chips and shapes of models; minutes in all."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

SCRIPT = Path(octavo.__file__).parent / "ci/tpu_compile.py"
# Settings for quick tests would have the compiler leave out what is to be judged.
_spec = importlib.util.spec_from_file_location("tpu_compile", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
tpu_compile = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tpu_compile)
ENV = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *args], env=ENV, capture_output=True, text=True, check=False)


def needs_libtpu() -> None:
    for package in ("jax", "libtpu"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'octavo[tpu]' brings it")


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "model", "devices"), tpu_compile.CASES)
def test_the_programs_compile_and_fit(topology: str, model: str, devices: int, tmp_path: Path) -> None:
    needs_libtpu()
    path = tmp_path / "report.json"
    done = run(
        "--model", model, "--topology", topology, "--tensor-parallel", str(devices), "--json", str(path)
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    for name in ("prefill", "decode"):
        program = report["programs"][name]
        assert program["aliased_bytes"] == report["cache_bytes_per_chip"]
        assert program["bytes_used"] <= report["hbm_bytes"]
        # Each weight is multiplied once, and padding is the only work that is not asked for.
        most = 1.4 if model == "demo" and devices > 1 else 1.1
        assert 0.99 < program["flops_over_least"] < most


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_it_is_compiled() -> None:
    needs_libtpu()
    done = run("--model", "llama-3.1-8b", "--topology", "v5e")
    assert done.returncode == 1
    assert "No room for a KV cache" in done.stdout


def test_without_libtpu_the_gate_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tpu_compile.py", "--model", "demo"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else object())
    assert tpu_compile.main() == tpu_compile.SKIPPED == 77
    assert "libtpu is not installed; pip install 'octavo[tpu]'" in capsys.readouterr().out
