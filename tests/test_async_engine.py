"""AsyncEngine and the engine's process, with a fake engine in a real child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from fake_engine import BUILDER, EOS, Order

from octavo.core.config import EngineConfig
from octavo.core.engine.async_engine import LONG_TEXT, AsyncEngine
from octavo.core.engine.output import RequestOutput
from octavo.core.engine.process import EngineProcess, _socket_directory
from octavo.core.errors import ConfigError, EngineDeadError, OctavoError, RequestError, UnavailableError
from octavo.core.sampling.params import SamplingParams


@contextlib.asynccontextmanager
async def engine(delay: float = 0.0, max_num_seqs: int = 256, **more: Any) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(max_num_seqs=max_num_seqs, backend_option={"delay": str(delay)})
    started = await AsyncEngine.start(config, builder=BUILDER, open_frontend=fake_engine.frontend, **more)
    try:
        yield started
    finally:
        await started.close()


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def whole(deltas: list[RequestOutput]) -> RequestOutput:
    first, *rest = deltas
    for delta in rest:
        first.merge(delta)
    return first


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, **given})


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# ------------------------------------------------------------------------------------------------ generate


def test_life_of_an_engine() -> None:
    """One child for what leaves it intact: a start with progress, streams, refusals, aborts, drain and close."""

    async def body() -> None:
        progress, lines = [], []
        async with engine(on_progress=lambda *a: progress.append(a), on_log=lines.append) as e:
            assert progress == [("load", 1, 2), ("load", 2, 2)]
            assert re.fullmatch(r"pid \d+", lines[0])
            assert e.info.model == "fake"
            assert e.generation_defaults == {"temperature": 0.5}
            assert not e.is_dead
            await check_streams(e)
            await check_many(e)
            await check_invalid(e)
            await check_same_id(e)
            await check_long_text(e)
            await check_bad_words(e)
            await check_drain(e)
            pid, directory = e._process.pid, e._process._directory
            assert pid
        assert not is_alive(pid)
        assert not os.path.exists(directory)
        with pytest.raises(UnavailableError):
            await collect(e.generate("abc", params(), "late"))

    asyncio.run(body())


async def check_streams(e: AsyncEngine) -> None:
    deltas = await collect(e.generate("abc", params(n=2, logprobs=0, prompt_logprobs=0), "r"))
    assert all(not d.finished for d in deltas[:-1])
    out = whole(deltas)
    assert (out.request_id, out.prompt, out.prompt_token_ids, out.finished) == ("r", "abc", [*b"abc"], True)
    assert [(o.index, o.text, o.finish_reason) for o in out.outputs] == [
        (0, "abcabcab", "length"),
        (1, "bcabcabc", "length"),
    ]
    assert [len(o.logprobs or ()) for o in out.outputs] == [8, 8]
    assert len(out.prompt_logprobs or ()) == 2
    assert out.num_cached_tokens == 3
    out = whole(await collect(e.generate([97, 98, EOS], params(), "r")))
    assert (out.prompt, out.outputs[0].text, out.outputs[0].finish_reason) == (None, "ab", "stop")
    # A stop string ends it here; the engine is told, so nothing goes on there.
    out = whole(await collect(e.generate("abcdef", params(stop="de", max_tokens=None), "r")))
    assert (out.outputs[0].text, out.outputs[0].stop_reason) == ("abc", "de")
    failed = whole(await collect(e.generate(Order.FAIL, params(), "r")))
    assert (failed.error, failed.outputs[0].finish_reason) == ("The fake engine fails this.", "error")
    assert e._outputs._requests == {}
    assert e._streams == {}


async def check_many(e: AsyncEngine) -> None:
    async def one(i: int) -> None:
        text = f"request {i} "
        out = whole(await collect(e.generate(text, params(max_tokens=50), f"many-{i}")))
        assert out.request_id == f"many-{i}"
        assert out.outputs[0].text == (text * 50)[:50]

    await asyncio.gather(*(one(i) for i in range(200)))
    assert e.stats.num_running + e.stats.num_waiting == 0
    assert e.stats.generated_tokens > 10_000


async def check_invalid(e: AsyncEngine) -> None:
    cases: list[tuple[Any, SamplingParams, str | None, str]] = [
        ("", params(), "prompt", "empty"),
        ([], params(), "prompt", "empty"),
        ([1, 257], params(), "prompt", "token 257"),
        ([-1], params(), "prompt", "token -1"),
        (["a"], params(), "prompt", "list of token ids"),
        (None, params(), "prompt", "list of token ids"),
        ("\ud800", params(), "prompt", "Unicode"),
        ("a" * 4096, params(), "prompt", "Shorten"),
        ("a", params(min_p=0.1), "min_p", "fake:0"),
        ("a", params(logit_bias={300: 1.0}), "logit_bias", "300"),
        ("a", params(bad_words=[" "]), "bad_words", "words"),
        ("a", params(ignore_eos="yes"), "ignore_eos", "wrong type.*bool"),
        ("a", params(bad_token_ids=[["a"]]), "bad_token_ids", "wrong type.*int"),
        ("a", params(stop_token_ids=[2**70]), None, "wrong type"),
        (Order.REFUSE, params(), "prompt", "fake engine refuses"),  # this one comes from the child
    ]
    for prompt, sampling, param, text in cases:
        with pytest.raises(RequestError, match=text) as caught:
            await collect(e.generate(prompt, sampling, "bad"))
        assert caught.value.param == param
    for field, value in (("priority", "high"), ("priority", 2**40), ("cache_salt", 5)):
        with pytest.raises(RequestError, match=field):
            await collect(e.generate("a", params(), "bad", **{field: value}))
    with pytest.raises(OctavoError, match="has a bug") as bug:
        await collect(e.generate(Order.BUG, params(), "bad"))
    assert type(bug.value) is OctavoError
    assert not e.is_dead
    assert len(await collect(e.generate("a", params(max_tokens=1), "bad"))) == 1


async def check_same_id(e: AsyncEngine) -> None:
    first = e.generate("abc", params(max_tokens=None), "same")
    await anext(first)
    with pytest.raises(RequestError, match="under way") as caught:
        await collect(e.generate("abc", params(), "same"))
    assert caught.value.param == "request_id"
    # Closing the generator aborts the request; its id may be used again at once, and the streams do not mix.
    await first.aclose()
    again = whole(await collect(e.generate("xyz", params(), "same")))
    assert again.outputs[0].text == "xyzxyzxy"
    await e.abort("unknown")


async def check_long_text(e: AsyncEngine) -> None:
    text = "long " * (LONG_TEXT // 4)
    out = whole(await collect(e.generate(text, params(), "long")))
    assert out.outputs[0].text == "long lon"
    with contextlib.suppress(asyncio.CancelledError):  # cancelled before it was submitted
        task = asyncio.create_task(collect(e.generate(text, params(), "long")))
        await asyncio.sleep(0)
        task.cancel()
        await task
    early = asyncio.create_task(collect(e.generate(text, params(max_tokens=None), "early")))
    await asyncio.sleep(0)
    assert len(e._outputs) == 0
    await e.abort("early")
    assert whole(await early).outputs[0].finish_reason == "abort"
    assert e._engine_ids == {}


async def check_bad_words(e: AsyncEngine) -> None:
    request = e._inputs.build("r", [1], params(bad_words=["no"], bad_token_ids=[[7]]))
    assert request.params.bad_words is None
    assert request.params.bad_token_ids == [[7], [*b"no"], [*b" no"]]


async def check_drain(e: AsyncEngine) -> None:
    running = asyncio.create_task(collect(e.generate("abc", params(max_tokens=None), "running")))
    await asyncio.sleep(0.05)
    draining = asyncio.create_task(e.drain(30))
    await asyncio.sleep(0)
    assert e.is_draining
    with pytest.raises(UnavailableError):
        await collect(e.generate("abc", params(), "refused"))
    assert await draining
    assert whole(await running).outputs[0].finish_reason == "length"


def test_slow_consumers_get_merged_deltas_and_abort_ends_a_stream() -> None:
    async def body() -> None:
        async with engine(delay=0.001) as e:
            stream = e.generate("abc", params(max_tokens=None), "slow")
            first = await anext(stream)
            await asyncio.sleep(0.3)
            second = await anext(stream)
            assert len(second.outputs[0].token_ids) > 10
            assert not await e.drain(0.05)
            await e.abort("slow")
            rest = [output async for output in stream]
            out = whole([first, second, *rest])
            assert out.outputs[0].finish_reason == "abort"
            assert out.outputs[0].text == ("abc" * 2000)[: len(out.outputs[0].token_ids)]
            assert await e.drain(1)

    asyncio.run(body())


def test_closing_or_cancelling_aborts_in_the_engine() -> None:
    async def body() -> None:
        async with engine(delay=0.001, max_num_seqs=2) as e:
            closed = e.generate("abc", params(max_tokens=None), "closed")
            await anext(closed)
            task = asyncio.create_task(collect(e.generate("abc", params(max_tokens=None), "cancelled")))
            await until(lambda: e.stats.num_running == 2)
            watcher = e.generate("x", params(max_tokens=None), "watcher")
            await closed.aclose()
            task.cancel()
            async for _ in watcher:  # the third can only run once the others have left
                if e.stats.num_running == 1 and e.stats.num_waiting == 0:
                    break
            await watcher.aclose()
            await until(lambda: e._idle.is_set())

    asyncio.run(body())


# ------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(("order", "text"), [(Order.CRASH, "the fake engine broke"), (Order.DIE, "SIGKILL")])
def test_a_broken_engine_fails_every_request(order: str, text: str) -> None:
    async def body() -> None:
        async with engine(delay=0.001) as e:
            running = [asyncio.create_task(collect(e.generate("abc", params(max_tokens=None), str(i)))) for i in "12"]
            await until(lambda: e.stats.num_running == 2)
            fatal = asyncio.create_task(collect(e.generate(order, params(), "fatal")))
            results = await asyncio.gather(*running, fatal, return_exceptions=True)
            assert [type(r) for r in results] == [EngineDeadError] * 3
            assert text in str(results[0])
            assert e.is_dead
            with pytest.raises(EngineDeadError):
                await collect(e.generate("abc", params(), "later"))
            assert await e.drain(1)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("config", ConfigError, "The fake engine was told to fail."),
        ("bug", EngineDeadError, "ZeroDivisionError: a bug"),
        ("die", EngineDeadError, "SIGKILL"),
    ],
)
def test_start_raises_what_the_child_raised(how: str, kind: type[OctavoError], text: str) -> None:
    config = EngineConfig(backend_option={"fail": how})
    with pytest.raises(kind, match=text) as caught:
        asyncio.run(AsyncEngine.start(config, builder=BUILDER, open_frontend=fake_engine.frontend))
    assert type(caught.value) is kind


def test_an_idle_engine_whose_device_is_lost_dies() -> None:
    async def body() -> None:
        config = EngineConfig(backend_option={"fail": "idle"})
        e = await AsyncEngine.start(config, builder=BUILDER, open_frontend=fake_engine.frontend)
        try:
            for _ in range(100):
                if e.is_dead:
                    break
                await asyncio.sleep(0.1)
            with pytest.raises(EngineDeadError, match="The fake device was lost"):
                await collect(e.generate("abc", params(), "r"))
        finally:
            await e.close()

    asyncio.run(body())


def test_close_fails_what_is_under_way() -> None:
    async def body() -> None:
        async with engine(delay=0.001) as e:
            stream = e.generate("abc", params(max_tokens=None), "r")
            await anext(stream)
            await e.close()
            with pytest.raises(EngineDeadError, match="closed"):
                await collect(stream)

    asyncio.run(body())


# ---------------------------------------------------------------------------------------------- the process

PARENT = """
import asyncio, sys
import fake_engine
from octavo.core.config import EngineConfig
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.sampling.params import SamplingParams

async def main():
    engine = await AsyncEngine.start(
        EngineConfig(backend_option={"delay": "0.001"}),
        builder=fake_engine.BUILDER, open_frontend=fake_engine.frontend,
    )
    print(engine._process.pid, engine._process._directory, flush=True)
    if "leave" in sys.argv:
        return
    async for _ in engine.generate("abc", SamplingParams(max_tokens=None), "r"):
        if "busy" not in sys.argv:
            await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


def start_parent(tmp_path: Path, *arguments: str) -> tuple[subprocess.Popen[str], int, str]:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert parent.stdout
    pid, _, directory = parent.stdout.readline().strip().partition(" ")
    return parent, int(pid), directory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    parent, child, directory = start_parent(tmp_path, "busy")
    # The child does not take part in a signal to the group: its parent is to decide.
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGTERM)
    time.sleep(0.1)
    assert is_alive(child)
    parent.kill()
    parent.wait()
    asyncio.run(until(lambda: not is_alive(child)))
    assert not os.path.exists(directory)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_parent_that_forgets_to_close_ends_all_the_same(tmp_path: Path) -> None:
    parent, child, directory = start_parent(tmp_path, "leave")
    assert parent.wait(20) == 0
    assert not is_alive(child)
    assert not os.path.exists(directory)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_child_uses_no_time() -> None:
    async def body() -> None:
        async with engine() as e:
            await collect(e.generate("abc", params(), "r"))
            stat = Path(f"/proc/{e._process.pid}/stat")

            def ticks() -> int:
                return sum(map(int, stat.read_text().split()[13:15]))

            before = ticks()
            await asyncio.sleep(0.5)
            assert ticks() - before <= 5  # of the 50 that a busy wait takes

    asyncio.run(body())


def test_sockets_stay_within_the_length_of_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    directory = _socket_directory()
    assert len(directory) < 40
    assert os.stat(directory).st_mode & 0o077 == 0
    os.rmdir(directory)


def test_kill_is_idempotent_even_before_the_start() -> None:
    process = EngineProcess(EngineConfig(), BUILDER)
    process.kill()
    process.kill()
