"""Several hosts as one executor: the same calls everywhere, and what happens when a host fails or is lost."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np
import pytest
from executor_hosts import FACTS, HostBackend, free_ports, process, run_follower, run_leader
from hash_backend import VOCAB, expected_tokens, tiny_spec
from test_engine import STATIC, greedy

from octavo.core.backend import Hosts, StepConstraints, StepLimits
from octavo.core.config import EngineConfig
from octavo.core.engine.build import build_engine
from octavo.core.engine.engine import EngineCore
from octavo.core.engine.types import EngineInfo, EngineRequest
from octavo.core.errors import ConfigError, EngineDeadError
from octavo.core.executor.facts import difference, facts
from octavo.core.executor.leader import Leader

LIMITS = StepLimits(256, 8, 64, 4)
SOON = 8.0  # seconds in which a lost host must be noticed


class Group:
    """A leader in this process and followers in others."""

    def __init__(self, constraints=None, followers=1, num_blocks=27, host_blocks=40, **options) -> None:
        self.constraints = constraints or StepConstraints()
        self.stack = ExitStack()
        port, count = free_ports(), followers + 1
        given = {"constraints": self.constraints} | options
        self.hosts = [
            self.stack.enter_context(process(run_follower, port, rank, count, FACTS, given)) for rank in range(1, count)
        ]
        self.own = HostBackend(self.constraints)
        self.leader = Leader(Hosts(f"127.0.0.1:{port}", count, 0), FACTS, lambda: self.own, lambda line: None)
        self.num_blocks, self.host_blocks = num_blocks, host_blocks

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.leader.close()
        self.stack.close()

    def engine(self) -> EngineCore:
        self.leader.load(tiny_spec(), "weights")
        self.leader.init_cache(LIMITS, self.num_blocks, self.host_blocks)
        self.leader.warmup([])
        info = EngineInfo(
            "hash", "hash", "hash", "float32", "float32", VOCAB, [], 256, 8, 64, 4, self.num_blocks - 1, 1, 0, [], []
        )
        return EngineCore(self.leader, info, LIMITS, self.constraints, self.num_blocks, self.host_blocks)


def run_and_wait(engine: EngineCore) -> None:
    """Runs what there is, and then is idle for a while, as the engine's process would be."""
    limit = time.monotonic() + SOON
    while time.monotonic() < limit:
        if engine.has_work:
            engine.step()
        else:
            engine.check()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("constraints", "followers"),
    [(StepConstraints(max_in_flight=3), 2), (STATIC, 1)],
    ids=["3 in flight, 3 hosts", "static"],
)
def test_every_host_does_the_same(constraints, followers) -> None:
    """Chunks, shared prefixes, copies on write, swaps, steps in flight: all hosts end with the same digest."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(1, 60, 12)]
    with Group(constraints, followers) as group:
        engine = group.engine()
        for i, prompt in enumerate(prompts):
            engine.add_request(EngineRequest(str(i), prompt, greedy(12, n=1 + i % 2)))
        tokens: dict = {}
        while engine.has_work:
            for out in engine.step():
                tokens.setdefault((int(out.request_id), out.index), []).extend(out.token_ids)
        assert tokens == {
            (i, index): expected_tokens(prompt, 12) for i, prompt in enumerate(prompts) for index in range(1 + i % 2)
        }
        assert engine.stats().preemptions > 0
        steps = group.own.steps
        engine.close()
        for child, results in group.hosts:
            assert results.recv() == ("ended", (group.own.digest.hexdigest(), steps, 0, "None"))
            child.join(SOON)
            assert child.exitcode == 0
        assert group.own.most_outstanding == constraints.max_in_flight


def test_memory_is_what_every_host_has() -> None:
    with Group(memory=1 << 20) as group:
        plan = group.leader.memory(tiny_spec(), LIMITS)
        assert (plan.total, plan.available) == (1 << 20, 1 << 20)
        assert plan.weights == group.own.memory(tiny_spec(), LIMITS).weights


def test_an_exception_on_a_follower_reaches_the_leader() -> None:
    with Group(raise_at=3) as group:
        engine = group.engine()
        engine.add_request(EngineRequest("a", [1, 2, 3], greedy(50)))
        with pytest.raises(EngineDeadError, match="Host 1 failed in a step: RuntimeError: the device stumbled"):
            run_and_wait(engine)
        with pytest.raises(EngineDeadError, match="the device stumbled"):
            group.leader.swap_in(np.zeros(1, np.int32), np.zeros(1, np.int32))
        engine.close()
        assert group.hosts[0][1].recv() == ("RuntimeError", "the device stumbled")


def test_an_idle_engine_notices_a_failed_follower() -> None:
    with Group(raise_at=2) as group:
        engine = group.engine()
        engine.add_request(EngineRequest("a", [1, 2, 3], greedy(2)))
        with pytest.raises(EngineDeadError, match="Host 1 failed"):  # mostly when rank 0 is done with its last step
            run_and_wait(engine)
        assert group.hosts[0][1].recv() == ("RuntimeError", "the device stumbled")


@pytest.mark.parametrize("where", ["follower", "leader"])
def test_a_killed_follower_is_noticed_while_a_call_hangs(where: str) -> None:
    with Group(hang_at=2 if where == "follower" else 0) as group:
        engine = group.engine()
        group.own.hang_at = 2
        engine.add_request(EngineRequest("a", [1, 2, 3], greedy(50)))
        engine.step()
        begin = time.monotonic()
        group.hosts[0][0].kill()
        with pytest.raises(EngineDeadError, match="Host 1 of 2 is lost"):
            engine.step()
        engine.close()
        assert time.monotonic() - begin < SOON


def test_a_failure_on_rank_0_ends_the_followers_with_its_text() -> None:
    with Group() as group:
        engine = group.engine()
        group.own.fail_at = {2}
        engine.add_request(EngineRequest("a", [1, 2, 3], greedy(50)))
        with pytest.raises(
            EngineDeadError, match="failed on rank 0 of several hosts: RuntimeError: the device stumbled"
        ):
            run_and_wait(engine)
        kind, text = group.hosts[0][1].recv()
        assert kind == "EngineDeadError"
        assert "rank 0 has ended" in text
        assert "the device stumbled" in text


def test_an_engine_that_cannot_be_built_ends_the_followers_with_its_text() -> None:
    with Group() as group:
        group.leader.close("The model does not fit.")
        kind, text = group.hosts[0][1].recv()
        assert (kind, text) == ("EngineDeadError", "Host 1: rank 0 has ended: The model does not fit.")


def test_a_follower_ends_with_its_leader() -> None:
    """The follower is first: it waits for the leader to come."""
    port = free_ports()
    with process(run_follower, port, 1, 2, FACTS, {"constraints": StepConstraints()}) as (follower, _):
        with process(run_leader, port) as (leader, started):
            assert started.recv() == leader.pid
            begin = time.monotonic()
            leader.kill()
            follower.join(SOON)
        assert follower.exitcode == 1
        assert time.monotonic() - begin < SOON


def test_hosts_that_differ_are_refused_on_both_sides() -> None:
    port = free_ports()
    other = {"the model's name": "another"}
    with process(run_follower, port, 1, 2, other, {"constraints": StepConstraints()}) as (_, results):
        with pytest.raises(ConfigError, match="Host 1 differs from rank 0 in the model's name: 'another'") as error:
            Leader(Hosts(f"127.0.0.1:{port}", 2, 0), FACTS, lambda: pytest.fail("too early"), lambda line: None)
        assert results.recv() == ("ConfigError", str(error.value))


def test_a_rank_that_comes_twice_is_refused() -> None:
    port, options = free_ports(), {"constraints": StepConstraints()}
    with ExitStack() as stack:
        twins = [stack.enter_context(process(run_follower, port, 1, 3, FACTS, options)) for _ in range(2)]
        lines: list[str] = []

        def log(line: str) -> None:
            lines.append(line)
            if "--host-rank 1 already" in line:
                stack.enter_context(process(run_follower, port, 2, 3, FACTS, options))

        leader = Leader(Hosts(f"127.0.0.1:{port}", 3, 0), FACTS, lambda: HostBackend(**options), log)
        assert any("waits on 127.0.0.1 port" in line and "for rank 1, 2" in line for line in lines)
        refused = [results.recv() for _, results in twins if results.poll(SOON / 4)]
        assert refused == [("ConfigError", "There is a host with --host-rank 1 already: give each its own.")]
        leader.close()


def test_facts_name_what_differs() -> None:
    config = EngineConfig(num_hosts=2, coordinator="a:1", model="here")
    mine = facts(config, "tpu", tiny_spec())
    twin = EngineConfig(num_hosts=2, coordinator="b:2", model="there", host_rank=1)
    assert difference(mine, facts(twin, "tpu", tiny_spec()), 1) == ""
    assert "in the model's eos_token_ids: [7]" in difference(mine, facts(twin, "tpu", tiny_spec(eos=(7,))), 1)
    options = EngineConfig(num_hosts=2, coordinator="a:1", host_rank=1, dtype="bfloat16")
    text = difference(mine, facts(options, "tpu", tiny_spec()), 1)
    assert "Host 1 differs from rank 0 in --dtype: 'bfloat16' on host 1, 'auto' on rank 0." in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hosts": 2, "host_rank": 2, "coordinator": "a:1"}, "--host-rank 2 must be below --num-hosts"),
        ({"host_rank": 1}, "--host-rank 1 must be below"),
        ({"num_hosts": 2}, "needs --coordinator"),
        ({"num_hosts": 2, "coordinator": "a"}, "must be HOST:PORT"),
        ({"num_hosts": 2, "coordinator": "a:65535"}, "must be HOST:PORT"),
        ({"coordinator": "a:1"}, "--coordinator is for several hosts"),
        ({"num_hosts": 0}, "at least 1"),
    ],
)
def test_contradictory_options_are_refused(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_a_backend_for_one_host_and_an_engine_off_rank_0_are_refused(demo_model) -> None:
    with pytest.raises(ConfigError, match="the plugin reference runs on one host only"):
        build_engine(EngineConfig(device="reference", num_hosts=2, coordinator="127.0.0.1:9"))
    with pytest.raises(ConfigError, match="octavo serve"):
        build_engine(EngineConfig(device="tpu", num_hosts=2, host_rank=1, coordinator="127.0.0.1:9"))


def test_a_port_in_use_is_told() -> None:
    import zmq

    port = free_ports()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as taken:
        taken.bind(f"tcp://127.0.0.1:{port + 1}")
        with pytest.raises(ConfigError, match=f"port {port + 1}, the port after --coordinator's"):
            Leader(Hosts(f"127.0.0.1:{port}", 2, 0), FACTS, lambda: pytest.fail("too early"), lambda line: None)
