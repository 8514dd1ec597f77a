"""The HTTP server over a fake engine in a real process, with real clients."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer

from octavo.server.settings import ServerOptions

MESSAGES: Any = [{"role": "user", "content": "hello"}]
LONG = {"prompt": "abcd", "max_tokens": 3000}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer() as live:
        yield live


@pytest.fixture(scope="module")
def slow() -> Iterator[LiveServer]:
    """2 ms per token, so that a long answer takes seconds."""
    with LiveServer(delay=0.002) as live:
        yield live


@pytest.fixture(scope="module")
def guarded() -> Iterator[LiveServer]:
    options = ServerOptions(
        served_model_name="mine/model", api_key="sécret", max_body_size=1000, cors_origins=["https://page.example"]
    )
    with LiveServer(options=options) as live:
        yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error's body, checked for its shape."""
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    return body["error"]


def events(text: str) -> list[Any]:
    """The data of a stream's events, checked for their form."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


# The official client


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "abcab"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_completion_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["abc", "xyz"], max_tokens=3, n=2)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == ["abc", "bca", "xyz", "yzx"]
    ids = client.completions.create(model="fake", prompt=[[97, 98], [99]], max_tokens=2)
    assert [c.text for c in ids.choices] == ["ab", "cc"]


def test_completion_default_is_16_tokens(client: openai.OpenAI) -> None:
    assert client.completions.create(model="fake", prompt="a").choices[0].text == "a" * 16


def test_completion_stream(client: openai.OpenAI) -> None:
    texts = {0: "", 1: "", 2: "", 3: ""}
    reasons = {}
    usage = None
    stream = client.completions.create(
        model="fake", prompt=["abc", "é€"], max_tokens=10, n=2, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        assert chunk.object == "text_completion"
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        if chunk.usage:
            assert not chunk.choices
            usage = chunk.usage
    assert texts[0] == "abcabcabca"
    assert texts[1] == "bcabcabcab"
    assert texts[2] == "é€é€"
    assert reasons == dict.fromkeys(range(4), "length")
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (8, 40)


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="aé", max_tokens=4, logprobs=1)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "a"]
    assert found.token_logprobs == [-1.0, -2.0, -3.0, -4.0]
    assert found.text_offset == [0, 1, 1, 2]
    assert found.top_logprobs is not None
    assert found.top_logprobs[0] == {"a": -1.0}


def test_completion_echo(client: openai.OpenAI, server: LiveServer) -> None:
    for stream in (False, True):
        body = {"prompt": "ab", "max_tokens": 3, "echo": True, "logprobs": 0, "n": 2, "stream": stream}
        response = server.http.post("/v1/completions", json=body)
        if stream:
            choices = [c for e in events(response.text)[:-1] for c in e["choices"] if c["index"] == 1]
        else:
            choices = response.json()["choices"][1:]
        assert "".join(c["text"] for c in choices) == "abbab"
        assert [t for c in choices for t in c["logprobs"]["tokens"]] == ["a", "b", "b", "a", "b"]
        assert [t for c in choices for t in c["logprobs"]["token_logprobs"]][:2] == [None, -1.0]
        assert [t for c in choices for t in c["logprobs"]["text_offset"]] == [0, 1, 2, 3, 4]
    scored = client.completions.create(model="fake", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == "abc"
    assert scored.choices[0].logprobs is not None
    assert scored.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=6, n=2, logprobs=True, top_logprobs=1, seed=3
    )
    assert answer.object == "chat.completion"
    assert [c.message.content for c in answer.choices] == ["user: ", "ser: h"]
    assert answer.choices[0].message.role == "assistant"
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert [t.token for t in found.content] == list("user: ")
    assert found.content[0].bytes == [ord("u")]
    assert found.content[0].top_logprobs[0].logprob == -1.0


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=6, n=2, stream=True, logprobs=True
    )
    roles, texts, tokens = [], {0: "", 1: ""}, 0
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            if choice.delta.role:
                roles.append(choice.index)
            texts[choice.index] += choice.delta.content or ""
            tokens += len(choice.logprobs.content or []) if choice.logprobs else 0
    assert sorted(roles) == [0, 1]
    assert texts == {0: "user: ", 1: "ser: h"}
    assert tokens == 12


def test_chat_goes_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 4080}])
    assert answer.usage is not None
    assert answer.usage.total_tokens == 4096


def test_async_client(server: LiveServer) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(i: int) -> str:
                stream = await client.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": f"{i:03d}"}], max_tokens=9, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            assert await asyncio.gather(*map(one, range(20))) == [f"user: {i:03d}" for i in range(20)]
            answer = await client.completions.create(model="fake", prompt="hey", max_tokens=3)
            assert answer.choices[0].text == "hey"

    asyncio.run(run())


def test_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    assert "'fake'" in str(missing.value)
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    assert client.models.list().data[0].id == "fake"
    assert client.models.retrieve("fake").id == "fake"


# Extras and details


def test_stop_strings_and_tokens(server: LiveServer) -> None:
    def choice(**fields: Any) -> dict[str, Any]:
        body = {"prompt": "abcdef", "max_tokens": 20, **fields}
        return server.http.post("/v1/completions", json=body).json()["choices"][0]

    stopped = choice(stop=["de", "zz"])
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("abc", "stop", "de")
    assert choice(stop="de", include_stop_str_in_output=True)["text"] == "abcde"
    assert choice(stop_token_ids=[ord("c")])["stop_reason"] == ord("c")


def test_token_ids_and_prompt_logprobs(server: LiveServer) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 1}
    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["token_ids"] == [97, 98]
    assert choice["prompt_token_ids"] == [97, 98]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}]
    body = {"messages": MESSAGES, "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 1}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


def test_continue_final_message(server: LiveServer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    body = {"messages": messages, "max_tokens": 1, "continue_final_message": True, "return_token_ids": True}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert bytes(answer["prompt_token_ids"]).endswith(b"assistant: Well")
    both = server.http.post("/v1/chat/completions", json={**body, "add_generation_prompt": True})
    assert error_of(both)["param"] == "continue_final_message"


def test_template_kwargs_cannot_shadow_the_request(server: LiveServer) -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}
    assert error_of(server.http.post("/v1/chat/completions", json=body))["param"] == "chat_template_kwargs"


def test_tokenize_and_detokenize(server: LiveServer) -> None:
    assert server.http.post("/tokenize", json={"prompt": "hi"}).json()["tokens"] == [104, 105]
    chat = server.http.post("/tokenize", json={"messages": MESSAGES, "return_token_strs": True}).json()
    assert chat["count"] == len(chat["token_strs"])
    assert server.http.post("/detokenize", json={"tokens": [104, 256]}).json() == {"prompt": "h<eos>"}
    assert error_of(server.http.post("/detokenize", json={"tokens": [999]}))["param"] == "tokens"
    assert error_of(server.http.post("/tokenize", json={}))["param"] == "prompt"


def test_stream_is_well_formed(server: LiveServer) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "a\nb\r\u2028", "max_tokens": 8, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    found = events(response.text)
    assert found[-1] == "[DONE]"
    assert len({e["id"] for e in found[:-1]}) == 1
    assert "".join(e["choices"][0]["text"] for e in found[:-1]).startswith("a\nb\r")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: LiveServer) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 4, "stream": True})
    command = ["curl", "-sN", "--max-time", "10", f"{server.url}/v1/completions", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "".join(e["choices"][0]["text"] for e in events(done.stdout)[:-1]) == "abca"


# Errors


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_routing_errors(server: LiveServer, method: str, path: str, status: int) -> None:
    response = server.http.request(method, path)
    assert response.status_code == status
    error_of(response)
    assert response.headers["x-request-id"]
    assert status != 405 or response.headers["allow"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"prompt": "\xc3"}', b'{"prompt": "\\udc00"}', b"null"])
def test_malformed_bodies(server: LiveServer, path: str, body: bytes) -> None:
    response = server.http.post(path, content=body)
    assert response.status_code == 400
    error_of(response)


def test_context_length(server: LiveServer) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "x" * 5000}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 4000, "max_tokens": 97}, "max_tokens"),
        ("/v1/completions", {"prompt": ["a", "x" * 4096]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 5000}, "max_completion_tokens"),
    ):
        error = error_of(server.http.post(path, json={**body, "stream": True}))
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "4096" in error["message"]
    # What the advice says works; and a default is made to fit.
    fits = server.http.post("/v1/completions", json={"prompt": "x" * 4000, "max_tokens": 96})
    assert fits.json()["usage"]["total_tokens"] == 4096
    fits = server.http.post("/v1/completions", json={"prompt": "x" * 4090})
    assert fits.json()["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5, 999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"min_p": 0.5}, "min_p"),
        ({"prompt": "refuse this"}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_400(server: LiveServer, fields: Any, param: str, stream: bool) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "a", "stream": stream, **fields})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_engine_failure(server: LiveServer) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "fail this"})
    assert response.status_code == 500
    assert error_of(response)["message"] == "The fake engine fails this."
    several = server.http.post("/v1/completions", json={"prompt": ["a", "fail this"], "max_tokens": 100})
    assert several.status_code == 500
    server.wait_until(lambda: not server.context.active)


def test_failure_in_a_stream_is_an_event_and_the_end(server: LiveServer) -> None:
    body = {"prompt": ["abc", "fail this"], "max_tokens": 3000, "stream": True}
    response = server.http.post("/v1/completions", json=body)
    if response.status_code == 200:  # the other prompt's first token came first
        found = events(response.text)
        assert "[DONE]" not in found
        assert found[-1]["error"]["message"] == "The fake engine fails this."
    else:
        error_of(response)
    server.wait_until(lambda: not server.context.active)


def test_request_id(server: LiveServer) -> None:
    get = server.http.get
    assert get("/version", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("with space", "x" * 200):
        assert get("/version", headers={"X-Request-Id": bad}).headers["x-request-id"] not in (bad, "")


# The key, CORS, and the size of bodies


def test_api_key(guarded: LiveServer) -> None:
    http = guarded.http
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sécret".encode()}):
        response = http.get("/v1/models", headers=headers)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
    right = {"Authorization": "Bearer sécret".encode()}
    assert http.get("/v1/models", headers=right).json()["data"][0]["id"] == "mine/model"
    assert http.get("/v1/models/mine/model", headers=right).status_code == 200
    assert http.get("/health").status_code == 200
    assert http.get("/metrics").status_code == 200
    assert http.get("/nothing").status_code == 401


def test_cors(guarded: LiveServer) -> None:
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    ask["Access-Control-Request-Headers"] = "authorization"
    response = guarded.http.options("/v1/completions", headers=ask)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    other = guarded.http.options("/v1/completions", headers={**ask, "Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("chunked", [False, True])
def test_large_body_is_refused(guarded: LiveServer, chunked: bool) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 2**20

    headers = {"Authorization": "Bearer sécret".encode()}
    content = pieces() if chunked else b" " * 100 * 2**20
    begin = time.monotonic()
    response = guarded.http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert "1000 bytes" in response.json()["error"]["message"]
    assert time.monotonic() - begin < 10


def test_large_body_of_a_client_that_waits(guarded: LiveServer) -> None:
    """A client may send the headers only, and wait for the answer."""
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sécret\r\nContent-Length: 99999999\r\n\r\n"
        sock.sendall(head.encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")


# Clients that go away


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(slow: LiveServer, path: str, stream: bool) -> None:
    body = (
        {**LONG, "stream": stream, "n": 2, "prompt": ["abcd", "x"]}
        if path == "/v1/completions"
        else {"messages": MESSAGES, "max_tokens": 3000, "stream": stream}
    )
    before = slow.http.get("/metrics").text
    with httpx.Client(base_url=slow.url, timeout=10 if stream else 0.3) as http:
        if stream:
            with http.stream("POST", path, json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(path, json=body)
    slow.wait_until(lambda: not slow.context.active)
    slow.wait_until(lambda: slow.engine.stats.num_running == 0)
    count = 'octavo:request_success_total{finished_reason="abort",model_name="fake"} '
    after = slow.http.get("/metrics").text
    value = [float(text.split(count)[1].split()[0]) for text in (before, after)]
    assert value[1] - value[0] == (4 if path == "/v1/completions" else 1)


def test_many_streams_at_once(server: LiveServer) -> None:
    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=30) as http:

            async def one(i: int) -> str:
                body = {"prompt": f"{i:04d}", "max_tokens": 12, "stream": True}
                found = events((await http.post("/v1/completions", json=body)).text)
                return "".join(e["choices"][0]["text"] for e in found[:-1])

            return await asyncio.gather(*map(one, range(200)))

    assert asyncio.run(run()) == [f"{i:04d}" * 3 for i in range(200)]


# The end


def test_draining() -> None:
    body = {**LONG, "max_tokens": 200, "stream": True}
    with LiveServer(delay=0.002) as live, live.http.stream("POST", "/v1/completions", json=body) as running:
        lines = running.iter_lines()
        next(lines)
        live.context.draining = True
        for path in ("/v1/completions", "/v1/chat/completions"):
            refused = httpx.post(live.url + path, json={"prompt": "a"})
            assert refused.status_code == 503
            assert error_of(refused)["code"] == "draining"
            assert int(refused.headers["retry-after"]) > 0
        health = httpx.get(live.url + "/health")
        assert (health.status_code, error_of(health)["code"]) == (503, "draining")
        assert list(lines)[-2] == "data: [DONE]"


def test_requests_that_are_cut_are_told() -> None:
    with LiveServer(delay=0.002) as live:
        with live.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            live.call(live.context.abort_all())
            last = [line for line in lines if line][-1]
        assert json.loads(last[6:])["error"]["code"] == "aborted"


def test_full_queue_is_503() -> None:
    with LiveServer(delay=0.01, max_waiting=1, max_num_seqs=1) as live:

        async def run() -> list[int]:
            async with httpx.AsyncClient(base_url=live.url, timeout=20) as http:
                body = {"prompt": "a", "max_tokens": 20}
                answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(8)))
                return sorted(answer.status_code for answer in answers)

        codes = asyncio.run(run())
        assert codes[0] == 200
        assert codes[-1] == 503


@pytest.mark.parametrize("order", ["raise in step", "kill the process"])
def test_dead_engine(order: str) -> None:
    with LiveServer(delay=0.002) as live:
        with live.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            assert httpx.post(live.url + "/v1/completions", json={"prompt": order}, timeout=20).status_code == 503
            last = [line for line in lines if line][-1]
            assert json.loads(last[6:])["error"]["code"] == "engine_dead"
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})):
            assert error_of(live.http.post(path, json=body))["code"] == "engine_dead"
        assert live.http.get("/health").status_code == 503
        assert live.http.get("/metrics").status_code == 200
