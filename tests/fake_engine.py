"""An engine without a model: it "generates" known tokens, so that what surrounds an engine can be tested.

The tokenizer has one token per byte (ids 0 to 255) and <eos> (256). A request whose prompt is p is answered with p's
bytes, over and over, each completion i starting at byte i; so texts, positions and mixed-up streams are checkable.
A prompt may hold an order to the engine: see `Order`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from octavo.core.config import EngineConfig
from octavo.core.detokenize import BYTE_OF_CHAR
from octavo.core.engine.frontend import Frontend
from octavo.core.engine.types import EngineInfo, EngineOutput, EngineRequest, EngineStats, TokenLogprobs
from octavo.core.errors import ConfigError, EngineDeadError, RequestError, UnavailableError
from octavo.core.sampling.params import sampling_fields
from octavo.core.tokenizer import Tokenizer

EOS = 256
BUILDER = "fake_engine:build"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)


class Order:
    """Prompts that make the fake engine misbehave."""

    CRASH = "raise in step"
    DIE = "kill the process"
    REFUSE = "refuse this"
    BUG = "raise in add_request"
    FAIL = "fail this"


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and <eos>, which is special."""
    backend = Backend(models.BPE({**BYTE_OF_CHAR, "<eos>": EOS}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, {"eos_token": "<eos>"}, {"default": TEMPLATE})


def frontend(config: EngineConfig) -> Frontend:
    """What goes with the fake engine."""
    return Frontend(byte_tokenizer(), {"temperature": 0.5})


def build(config: EngineConfig, progress: Any = None, log: Any = None) -> FakeEngine:
    """Has the signature of `build_engine`. `backend_option` takes: fail=config|bug|idle, delay=seconds per step."""
    options = config.backend_option
    if progress:
        progress("load", 1, 2)
        progress("load", 2, 2)
    if log:
        log(f"pid {os.getpid()}")
    if options.get("fail") == "config":
        raise ConfigError("The fake engine was told to fail.")
    if options.get("fail") == "bug":
        raise ZeroDivisionError("a bug")
    if options.get("fail") == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return FakeEngine(config, float(options.get("delay", 0)))


class FakeEngine:
    """Stands in for EngineCore. Each step gives one token to each completion under way, at most max_num_seqs."""

    def __init__(self, config: EngineConfig = EngineConfig(), delay: float = 0.0, **info: Any) -> None:
        self._lost = config.backend_option.get("fail") == "idle"
        facts: dict[str, Any] = {
            "model": "fake",
            "family": "fake",
            "device": "fake:0",
            "dtype": "float32",
            "kv_dtype": "float32",
            "vocab_size": 257,
            "eos_token_ids": [EOS],
            "max_model_len": config.max_model_len or 4096,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "block_size": 16,
            "kv_blocks": 1000,
            "kv_block_bytes": 1024,
            "weight_bytes": 0,
            "sampling": [name for name in sampling_fields() if name != "min_p"],
            "choices": ["a fake"],
        }
        self.info = EngineInfo(**(facts | info))
        self.requests: dict[str, EngineRequest] = {}
        self.closed = False
        self.max_waiting = config.max_waiting
        self.most_waiting = 0
        self._delay = delay
        self._running: dict[tuple[str, int], int] = {}  # completion -> tokens so far
        self._ended: list[EngineOutput] = []
        self._steps = self._generated = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    def add_request(self, request: EngineRequest) -> None:
        prompt = bytes(t for t in request.prompt_token_ids if t < 256)
        if prompt == Order.REFUSE.encode():
            raise RequestError("The fake engine refuses this.", "prompt")
        if prompt == Order.BUG.encode():
            raise ZeroDivisionError("the fake engine has a bug")
        waiting = self.stats().num_waiting + request.params.n
        self.most_waiting = max(self.most_waiting, waiting)
        if waiting > self.max_waiting:
            raise UnavailableError("The queue is full.")
        self.requests[request.request_id] = request
        for index in range(request.params.n):
            self._running[request.request_id, index] = 0

    def abort(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is None:
            return
        for key in [key for key in self._running if key[0] == request_id]:
            del self._running[key]
            self._ended.append(EngineOutput(*key, [], "abort"))

    def step(self) -> list[EngineOutput]:
        if self._delay:
            time.sleep(self._delay)
        outputs, self._ended = self._ended, []
        for key in list(self._running)[: self.info.max_num_seqs]:
            outputs.append(self._advance(*key))
        self._steps += 1
        return outputs

    def _advance(self, request_id: str, index: int) -> EngineOutput:
        request = self.requests[request_id]
        params, prompt, done = request.params, request.prompt_token_ids, self._running[request_id, index]
        text = bytes(t for t in prompt if t < 256)
        if text == Order.CRASH.encode():
            raise ZeroDivisionError("the fake engine broke")
        if text == Order.DIE.encode():
            os.kill(os.getpid(), signal.SIGKILL)
        token = prompt[(index + done) % len(prompt)]
        out = EngineOutput(request_id, index, [token], num_cached_tokens=0 if done else 3)
        done += 1
        self._generated += 1
        self._running[request_id, index] = done
        if text == Order.FAIL.encode():
            out = EngineOutput(request_id, index, [], "error", error="The fake engine fails this.")
        elif token in params.stop_token_ids and done > params.min_tokens:
            out.finish_reason, out.stop_token = "stop", token
        elif token == EOS and not params.ignore_eos and done > params.min_tokens:
            out.finish_reason = "stop"
        elif done == params.max_tokens or len(prompt) + done >= self.info.max_model_len:
            out.finish_reason = "length"
        if params.logprobs is not None:
            out.logprobs = [TokenLogprobs(token, -float(done), 1, [token], [-float(done)])]
        if params.prompt_logprobs is not None and done == 1:
            out.prompt_logprobs = [TokenLogprobs(t, -1.0, 1, [], []) for t in prompt[1:]]
        if out.finish_reason:
            del self._running[request_id, index]
            if not any(key[0] == request_id for key in self._running):
                del self.requests[request_id]
        return out

    def stats(self) -> EngineStats:
        running = min(len(self._running), self.info.max_num_seqs) if self._steps else 0
        return EngineStats(
            num_running=running,
            num_waiting=len(self._running) - running,
            generated_tokens=self._generated,
            steps=self._steps,
        )

    def check(self) -> None:
        if self._lost:
            raise EngineDeadError("The fake device was lost.")

    def close(self) -> None:
        self.closed = True
