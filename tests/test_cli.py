"""The command line: quick, clear when something is wrong, and orderly when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from live_server import LiveServer
from typer.testing import CliRunner

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.server.bench.report import percentile, spread
from octavo.server.bench.workload import load, synthetic
from octavo.server.cli import app
from octavo.server.options import parse_bytes, parse_pairs, with_engine_options
from octavo.server.terminal import ChatOptions, chat

FAKE = [sys.executable, str(Path(__file__).parent / "fake_octavo.py")]
OCTAVO = [sys.executable, "-m", "octavo.server"]


def run(*args: str, command: list[str] = FAKE, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *args], capture_output=True, text=True, timeout=60, **more)


# Start-up


@pytest.mark.parametrize(
    "code",
    [
        "import octavo",
        "import octavo.server.cli",
        "import sys; sys.argv = ['octavo', '--help']\n"
        "import octavo.server.cli\n"
        "try: octavo.server.cli.main()\n"
        "except SystemExit: pass",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    heavy = "{'torch', 'jax', 'numpy', 'transformers', 'fastapi', 'uvicorn', 'pydantic', 'httpx', 'tokenizers'}"
    code += f"\nimport sys; print('LOADED', sorted({heavy} & set(sys.modules)))"
    done = run(command=[sys.executable, "-c", code])
    assert done.stdout.endswith("LOADED []\n"), done


def test_help_names_every_engine_option() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for f in fields(EngineConfig):
        if f.name != "model":
            assert "--" + f.name.replace("_", "-") in text
    assert "--no-prefix-caching" in text


def test_version() -> None:
    assert re.fullmatch(r"octavo \d+\.\d+.*\n", CliRunner().invoke(app, ["--version"]).output)


# Options


def config_of(*args: str) -> EngineConfig:
    """What the command line makes of arguments."""
    seen: list[EngineConfig] = []

    def command(config: EngineConfig) -> None:
        seen.append(config)

    small = typer.Typer(pretty_exceptions_enable=False)
    small.command()(with_engine_options(command))
    result = CliRunner().invoke(small, args)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen[0]


def test_options_default_to_the_configurations() -> None:
    assert config_of() == EngineConfig()


def test_options_become_the_configuration() -> None:
    found = config_of(
        "some/model", "--dtype", "bfloat16", "--kv-cache-memory", "4GiB", "--swap-space", "512MB", "--seed", "-5",
        "--no-prefix-caching", "--backend-option", "a=1", "--backend-option", "b=x=y", "--max-model-len", "77",
        "--quantization", "int8", "--threads", "3",
    )  # fmt: skip
    assert found == EngineConfig(
        model="some/model",
        dtype="bfloat16",
        kv_cache_memory=4 * 2**30,
        swap_space=512 * 10**6,
        seed=-5,
        prefix_caching=False,
        backend_option={"a": "1", "b": "x=y"},
        max_model_len=77,
        quantization="int8",
        threads=3,
    )


def test_contradictions_are_the_configurations_to_find() -> None:
    with pytest.raises(ConfigError, match="not both"):
        config_of("--memory-utilization", "0.5", "--kv-cache-memory", "1GB")


@pytest.mark.parametrize(
    "args",
    [["--dtype", "int3"], ["--quantization", "int3"], ["--max-num-seqs", "0"], ["--swap-space", "4G"], ["--what"]],
)
def test_usage_errors(args: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", *args])
    assert result.exit_code == 2
    assert args[0] in result.output


def test_parse_bytes() -> None:
    assert parse_bytes("123") == 123
    assert parse_bytes("1.5 KiB") == 1536
    assert parse_bytes("2tb") == 2 * 10**12
    for wrong in ("", "4G", "-1", "GiB", "1 potato"):
        with pytest.raises(typer.BadParameter):
            parse_bytes(wrong)
    with pytest.raises(typer.BadParameter, match=r"4GiB.*4GB"):
        parse_bytes("4G")


def test_parse_pairs() -> None:
    assert parse_pairs(["a=1", "a=1"], "--x") == {"a": "1"}
    for wrong in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(typer.BadParameter):
            parse_pairs(wrong, "--x")


# Errors


def test_an_error_is_one_message() -> None:
    for args in (["serve", "--backend-option", "fail=config"], ["complete", "hi", "--backend-option", "fail=config"]):
        done = run(*args, "--port", "0") if args[0] == "serve" else run(*args)
        assert done.returncode == 1
        assert done.stderr == "octavo: The fake engine was told to fail.\n"
        assert done.stdout == ""


def test_missing_model() -> None:
    done = run("serve", "/nowhere/at/all", "--port", "0", command=OCTAVO)
    assert done.returncode == 1
    assert done.stderr.startswith("octavo: ")
    assert "Traceback" not in done.stderr


def test_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("serve", "/nowhere/at/all", "--port", port, command=OCTAVO)
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert "--port 0" in done.stderr


# serve


@contextlib.contextmanager
def serving(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its URL."""
    command = [*FAKE, "serve", "--port", "0", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.search(r"is ready: (http://\S+)", line)
            assert match, line + process.communicate(timeout=10)[1]
            yield process, match[1]
        finally:
            process.kill()


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(pids: list[int]) -> bool:
    """Whether processes end within 3 seconds; multiprocessing's resource tracker ends after its parent."""
    deadline = time.monotonic() + 3
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def stream(url: str, tokens: int) -> Any:
    body = {"prompt": "ab", "max_tokens": tokens, "stream": True}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20)


def test_serve_drains_on_sigterm() -> None:
    with serving("--backend-option", "delay=0.005") as (process, url):
        offspring = children(process.pid)
        assert process.stdout is not None
        assert any("a fake" in process.stdout.readline() for _ in range(3))  # the choices
        with stream(url, 200) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)  # at once: as a wrapper does it, and one signal in effect
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        _, err = process.communicate(timeout=10)
        assert process.returncode == 0
        assert "finishing 1 requests" in err
        assert gone(offspring)


def test_serve_cuts_what_outlasts_the_drain_timeout() -> None:
    with serving("--backend-option", "delay=0.005", "--drain-timeout", "0.2") as (process, url):
        with stream(url, 4000) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-1]
        assert json.loads(last[6:])["error"]["code"] == "aborted"
        process.communicate(timeout=10)
        assert process.returncode == 0


def test_second_signal_ends_at_once() -> None:
    with serving("--backend-option", "delay=0.005") as (process, url):
        offspring = children(process.pid)
        with stream(url, 4000) as response:
            lines = response.iter_lines()  # kept, since dropping it closes the connection
            next(lines)
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            time.sleep(0.7)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=10)
        assert time.monotonic() - begin < 5
        assert process.returncode == 128 + signal.SIGTERM
        assert gone(offspring)


def test_serve_ends_when_the_engine_dies() -> None:
    with serving() as (process, _):
        os.kill(max(children(process.pid)), signal.SIGKILL)
        _, err = process.communicate(timeout=15)
        assert process.returncode == 1
        assert "engine has stopped" in err


def test_signal_before_ready() -> None:
    # The fake engine's start is quick, so the signal is sent as soon as the process has its handlers.
    with subprocess.Popen([*FAKE, "serve", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        caught = ""
        while not (int(caught or "0", 16) >> (signal.SIGTERM - 1) & 1):
            status = Path(f"/proc/{process.pid}/status").read_text()
            caught = re.findall(r"SigCgt:\s*(\w+)", status)[0]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=15)
        assert process.returncode in (0, 128 + signal.SIGTERM)


# chat, complete, devices, bench


def test_complete() -> None:
    assert run("complete", "abc", "--max-tokens", "7").stdout == "abcabca\n"
    assert run("complete", "-", "--max-tokens", "4", input="xy").stdout == "xyxy\n"
    refused = run("complete", "refuse this")
    assert (refused.returncode, refused.stderr) == (1, "octavo: The fake engine refuses this.\n")


def test_chat() -> None:
    done = run("chat", "--max-tokens", "6", "--system", "be", input="hello\n\nagain\n")
    assert done.returncode == 0
    assert done.stdout == "> system\n> > system\n> \n"


def test_chat_with_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    def ask(lines: Iterator[str]) -> Any:
        def answer(_: str) -> str:
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        return answer

    with LiveServer() as live:
        chat(EngineConfig(), ChatOptions(url=live.url + "/v1", max_tokens=11), ask(iter(["hello"])))
        assert capsys.readouterr().out == "user: hello\n\n"
        chat(EngineConfig(model="other"), ChatOptions(url=live.url), ask(iter(["hello"])))
        assert "'other' is not served here" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="--url"):
            chat(EngineConfig(dtype="float16"), ChatOptions(url=live.url), ask(iter([])))
    chat(EngineConfig(), ChatOptions(url=live.url), ask(iter(["hello"])))
    assert "cannot be reached" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on() -> None:
    command = [*FAKE, "chat", "--backend-option", "delay=0.01"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        process.stdin.write("hello\n")
        process.stdin.flush()
        seen = ""
        while "user" not in seen:
            seen += process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        while "[stopped]" not in seen:
            seen += process.stdout.read(1)
        _, err = process.communicate(timeout=20)  # closes stdin, as Ctrl-D does
        assert process.returncode == 0, err


def test_devices() -> None:
    done = run("devices", "--json", command=OCTAVO)
    found = {plugin["plugin"]: plugin for plugin in json.loads(done.stdout)}
    assert found["reference"]["devices"][0]["id"] == "reference"
    table = run("devices", command=OCTAVO).stdout
    assert table.startswith("PLUGIN")
    assert "reference" in table


def test_bench_serve(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt_ids": [97 + i], "max_tokens": 5, "id": i}) for i in range(6)))
    out = tmp_path / "out.json"
    with LiveServer() as live:
        args = ["bench", "serve", "--url", live.url, "--workload", str(rows), "--rate", "100", "--json", str(out)]
        done = run(*args, "--concurrency", "2", command=OCTAVO)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert (found["requests"], found["failed"], found["output_tokens"]) == (6, 0, 30)
    assert set(found["ttft_s"]) == {"mean", "p50", "p95", "p99", "max"}


def test_bench_latency(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("bench", "latency", "--output-len", "8", "--repeats", "2", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["decode_tok_s"]["p50"] > 0


def test_workloads(tmp_path: Path) -> None:
    made = synthetic(50, 20, 10, 0, 100)
    assert made == synthetic(50, 20, 10, 0, 100)
    assert made != synthetic(50, 20, 10, 1, 100)
    assert all(0 <= token < 100 for row in made for token in row.prompt_ids)
    file = tmp_path / "rows"
    for text, message in (("", "no rows"), ("{}", "line 1"), ('{"prompt_ids": [], "max_tokens": 1}', "empty")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(file)


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 95) == 9.5
    assert spread([]) is None
