"""The TPU plugin over two hosts, which are two processes here: JAX's CPU devices with collectives through gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from executor_hosts import free_ports

from octavo import LLM, SamplingParams
from octavo.core.backend import BackendConfig, Hosts
from octavo.core.errors import ConfigError

pytest.importorskip("jax")
SOON = 15.0  # seconds in which a lost host must be noticed
BLOCK_BYTES = 2 * 3 * 2 * 64 * 4 * 16  # of the model below, in float32, with heads padded to 64
OPTIONS = {
    "device": "tpu:cpu",
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 19,
    "max_model_len": 140,
    "kv_cache_memory": 16 * BLOCK_BYTES,
    "swap_space": 16 << 20,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """A random model, and it in Transformers."""
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=199, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)  # spread the logits, so that ties are improbable
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return path, model


def start(model: Path, port: int, rank: int, **more) -> subprocess.Popen:
    """A host of two, as a process."""
    options = OPTIONS | more | {
        "model": str(model), "num_hosts": 2, "host_rank": rank, "coordinator": f"127.0.0.1:{port}",
        "backend_option": {"tensor_parallel": "2"},
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("jax_hosts.py")), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if more else None,
        text=True,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    )


class TwoHosts:
    """Rank 0 and its follower."""

    def __init__(self, model: Path) -> None:
        port = free_ports()
        with ExitStack() as stack:
            self.follower, self.leader = (stack.enter_context(start(model, port, rank)) for rank in (1, 0))
            stack.callback(self.kill)
            assert "ready" in self.answer()
            self._stack = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def kill(self) -> None:
        for process in (self.leader, self.follower):
            process.kill()

    def ask(self, prompts: list[list[int]], tokens: int) -> None:
        self.leader.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.leader.stdin.flush()

    def answer(self) -> dict:
        for line in self.leader.stdout:
            if line.startswith("{"):  # gloo speaks on stdout as well
                return json.loads(line)
        pytest.fail("rank 0 has ended")


def test_two_hosts_make_the_tokens_of_one(tiny) -> None:
    """Against Transformers and one host: chunks of 19 tokens, preemption by swap, the prefix cache, an orderly end."""
    import torch

    path, model = tiny
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 199, n).tolist() for n in (1, 3, 17, 30, 48, 64, 70, 90)]
    expected = []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    with TwoHosts(path) as hosts:
        hosts.ask(prompts, 40)
        answer = hosts.answer()
        assert answer["tokens"] == expected
        assert answer["preemptions"] > 0
        hosts.ask(prompts[-1:], 40)
        again = hosts.answer()
        assert again["tokens"] == expected[-1:]
        assert again["prefix_hits"] > answer["prefix_hits"]
        hosts.follower.send_signal(signal.SIGTERM)  # as a supervisor does that stops all hosts at once
        time.sleep(1)
        hosts.ask(prompts[:1], 5)
        assert hosts.answer()["tokens"] == [expected[0][:5]]
        hosts.leader.stdin.close()
        assert hosts.leader.wait(SOON) == 0
        assert hosts.follower.wait(SOON) == 0
        said = hosts.follower.stdout.read()
        assert "Ready; following rank 0." in said
        assert "SIGTERM: this host ends with rank 0" in said
        assert "Rank 0 has ended; so does this host." in said
    with LLM(str(path), **OPTIONS, backend_option={"tensor_parallel": "2"}) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in outputs] == expected


@pytest.mark.parametrize("killed", ["follower", "leader"])
def test_a_host_that_is_killed_ends_the_other(tiny, killed: str) -> None:
    path, _ = tiny
    with TwoHosts(path) as hosts:
        hosts.ask([[1, 2, 3]] * 2000, 60)  # seconds of work
        time.sleep(1)
        begin = time.monotonic()
        if killed == "follower":
            hosts.follower.kill()
            assert hosts.answer() == {
                "error": "EngineDeadError: Host 1 of 2 is lost: it has ended or cannot be reached."
            }
            assert hosts.leader.wait(SOON) == 3
        else:
            hosts.leader.kill()
            assert hosts.follower.wait(SOON) != 0
        assert time.monotonic() - begin < SOON


def test_a_model_that_does_not_fit_ends_both_hosts_with_the_reason(tiny) -> None:
    path, _ = tiny
    port = free_ports()
    hosts = [start(path, port, rank, kv_cache_memory=1 << 50) for rank in (0, 1)]
    try:
        for host in hosts:
            _, text = host.communicate(timeout=60)
            assert "--kv-cache-memory 1048576.0 GiB does not fit" in text
            assert host.returncode == 1, text
    finally:
        for host in hosts:
            host.kill()


def test_devices_are_taken_host_by_host() -> None:
    from octavo.backends.tpu.platform import _of_each_host

    found = [SimpleNamespace(process_index=i % 2, id=i) for i in range(7, -1, -1)]
    devices = _of_each_host(found, 4, Hosts("host:1", 2, 0))
    assert [(d.process_index, d.id) for d in devices] == [(0, 0), (0, 2), (1, 1), (1, 3)]
    with pytest.raises(ConfigError, match="needs 5 devices on each; JAX found 2 hosts with at least 4"):
        _of_each_host(found, 10, Hosts("host:1", 2, 0))


def test_devices_that_do_not_divide_over_the_hosts_are_refused() -> None:
    from octavo.backends.tpu import TpuFactory

    hosts = Hosts("127.0.0.1:1", 2, 0)
    with pytest.raises(ConfigError, match="tensor_parallel=3 must be a multiple of --num-hosts 2"):
        TpuFactory().create(BackendConfig("tpu:cpu", options={"tensor_parallel": "3"}, hosts=hosts))
