"""`octavo serve` as a user meets it: the demo model on the CPU, the official client, curl's view, and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from octavo.core.hub import ModelFiles

from .conftest import Reference
from .serving import Server

pytestmark = pytest.mark.demo
NAME = "SmolLM2-135M-Instruct"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(demo_model: ModelFiles) -> Iterator[Server]:
    # float32, to be equal with Transformers: of the file's own 4 bits, CPUs with VNNI round activations to 8 bits.
    server = Server("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "256MiB", "--max-num-seqs", "16")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_the_official_client_streams_a_coherent_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        temperature=0,
        max_completion_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    assert chunks[-1].usage.completion_tokens <= 30
    whole = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, max_completion_tokens=30)
    assert whole.choices[0].message.content == text
    assert whole.usage.prompt_tokens_details.cached_tokens > 0


def test_completions_equal_transformers(client: openai.OpenAI, reference: Reference) -> None:
    prompts = [reference.prompts[i] for i in (3, 6, 8)]

    def complete(prompt: list[int]) -> list[int]:
        answer = client.completions.create(
            model=NAME,
            prompt=prompt,
            temperature=0,
            max_tokens=16,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return answer.choices[0].token_ids

    with ThreadPoolExecutor(3) as pool:
        for prompt, output in zip(prompts, pool.map(complete, prompts), strict=True):
            reference.check_greedy(prompt, output)


def test_n_seed_stop_and_logprobs(client: openai.OpenAI) -> None:
    def ask() -> openai.types.Completion:
        return client.completions.create(
            model=NAME, prompt="Once upon a time", n=3, seed=5, max_tokens=12, temperature=0.8, logprobs=2, stop=["."]
        )

    first, second = ask(), ask()
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert len({c.text for c in first.choices}) > 1
    assert all("." not in c.text for c in first.choices)
    assert all(len(c.logprobs.tokens) == len(c.logprobs.token_logprobs) for c in first.choices)


def test_a_disconnect_frees_the_request_and_its_blocks(server: Server) -> None:
    body = {"model": NAME, "prompt": "Count: one, two,", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    for _ in range(3):
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
            assert next(response.iter_lines()).startswith("data: ")
    # One that goes away before its first token.
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        data = json.dumps(body | {"stream": False}).encode()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        time.sleep(0.3)
    server.wait_idle()


BAD = {
    "unknown model": ({"model": "nobody", "prompt": "x"}, 404, "model"),
    "too long": ({"prompt": [5] * 9000}, 400, "prompt"),
    "token out of vocabulary": ({"prompt": [10**6]}, 400, "prompt"),
    "empty prompt": ({"prompt": ""}, 400, "prompt"),
    "negative temperature": ({"prompt": "x", "temperature": -1}, 400, "temperature"),
    "wrong type": ({"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
    "unknown field": ({"prompt": "x", "temprature": 1}, 400, "temprature"),
    "top_p of zero": ({"prompt": "x", "top_p": 0}, 400, "top_p"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_told_what_is_wrong(server: Server, name: str) -> None:
    fields, status, param = BAD[name]
    response = httpx.post(server.url + "/v1/completions", json={"model": NAME} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
    assert len(response.json()["error"]["message"]) > 20


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b'{"model": "m", "prompt": NaN, "temperature": NaN}', 400),
        (b'{"prompt": "\xff\xfe"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b"not json", 400),
        (b'{"prompt": "' + b"x" * (100 << 20) + b'"}', 413),
    ],
    ids=["NaN", "not UTF-8", "half a surrogate", "not JSON", "100 MB"],
)
def test_broken_bodies(server: Server, data: bytes, status: int) -> None:
    response = httpx.post(server.url + "/v1/completions", content=data, timeout=60)
    assert response.status_code == status, response.text[:200]
    assert response.json()["error"]["message"]


def test_after_all_that_it_serves_and_nothing_is_left(server: Server, client: openai.OpenAI) -> None:
    server.wait_idle()
    answer = client.completions.create(model=NAME, prompt="The capital of France is", max_tokens=1, temperature=0)
    assert answer.choices[0].text == " Paris"


def test_sigterm_lets_a_running_request_finish(demo_model: ModelFiles) -> None:
    server = Server("--device", "cpu", "--kv-cache-memory", "64MiB", "--max-model-len", "512")
    body = {"model": NAME, "prompt": "Hello", "max_tokens": 40, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["./no/such/model"], "does not exist"),
        (["nobody"], "neither a path"),
        (["--device", "cuda"], "There is no device 'cuda'"),
        (["--max-model-len", "100000"], "more than the model's context length of 8192"),
        (["--kv-cache-memory", "1000GiB"], "does not fit"),
        (["--memory-utilization", "2"], "at most 1"),
        (["--dtype", "float17"], "float17"),
        (["--backend-option", "speed=11"], "no option speed"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_message(demo_model: ModelFiles, options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "octavo.server", "serve", "--port", "0", *options]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
