"""The scheduler and the block manager over random histories of requests, steps, aborts and device failures."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hash_backend import VOCAB, expected_tokens
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_engine import STATIC, greedy, make_engine

from octavo.core.backend import StepConstraints
from octavo.core.engine.sequence import Status
from octavo.core.engine.types import EngineRequest

PREFIXES = ([], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4], list(range(20)))
SETUPS = [
    {},
    {"constraints": StepConstraints(max_in_flight=2)},
    {"host_blocks": 9},
    {"host_blocks": 30, "constraints": StepConstraints(max_in_flight=2)},
    {"constraints": StepConstraints(mixed=False)},
    {"constraints": STATIC, "host_blocks": 9},
    {"window": 7},
    {"window": 7, "host_blocks": 9, "constraints": StepConstraints(max_in_flight=2)},
    {"prefix_caching": False},
    {"budget": 6},
    {"chunked_prefill": False},
]
# Every request fits 16 blocks of 4 alone; several together do not. Prompt + output stay below 64 tokens.
NUM_BLOCKS, LONGEST_PROMPT, LONGEST_OUTPUT = 17, 32, 24


class EngineMachine(RuleBasedStateMachine):
    """Requests come, run, are aborted and fail; what ends well must have the tokens of the model alone."""

    @initialize(setup=st.sampled_from(SETUPS))
    def start(self, setup):
        self.setup = setup
        self.engine = make_engine(num_blocks=NUM_BLOCKS, max_num_seqs=4, **({"budget": 64} | setup))
        self.given: dict[str, tuple[list[int], int, int]] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], str] = {}
        self.aborted: set[str] = set()

    @rule(
        prefix=st.sampled_from(PREFIXES),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LONGEST_PROMPT - 20),
        count=st.integers(1, LONGEST_OUTPUT),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 1),
    )
    def add(self, prefix, own, count, n, priority):
        if len(self.given) - len({r for r, _ in self.ended}) > 12:
            return
        name = f"r{len(self.given)}"
        self.given[name] = (prefix + own, count, n)
        self.engine.add_request(EngineRequest(name, prefix + own, greedy(count, n=n), priority=priority))

    @precondition(lambda self: self.engine.has_work)
    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.run_step()

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.given)))
        if any((name, i) not in self.ended for i in range(self.given[name][2])):
            self.aborted.add(name)
        self.engine.abort(name)

    @precondition(lambda self: self.engine.has_work and not self.engine._failures)
    @rule()
    def device_stumbles(self):
        self.engine.backend.fail_at = {self.engine.backend.steps + 1}

    def run_step(self):
        outputs = self.engine.step()
        if self.engine.backend.violation:
            raise self.engine.backend.violation
        for out in outputs:
            key = (out.request_id, out.index)
            assert key not in self.ended, "output after the end"
            self.tokens.setdefault(key, []).extend(out.token_ids)
            if out.finish_reason:
                self.ended[key] = out.finish_reason

    @invariant()
    def the_books_agree(self):
        scheduler = self.engine.scheduler
        running = scheduler._running
        refs = Counter(b for seq in running for b in seq.blocks if b)
        assert all(scheduler.blocks.refs(b) == refs[b] for b in range(1, NUM_BLOCKS))
        assert scheduler.blocks.num_held == len(refs)
        assert running == sorted(running, key=lambda s: s.order)
        assert len(running) + scheduler.table.num_free == 4
        swapped = [h for seq in scheduler._waiting if seq.status is Status.WAITING for h in seq.host_blocks if h >= 0]
        assert sorted(swapped + scheduler._host_free) == list(range(self.setup.get("host_blocks", 0)))
        assert scheduler.stats.num_swapped == sum(bool(s.host_blocks) for s in scheduler._waiting)
        for seq in running:
            slot = seq.slot
            assert scheduler.table.sequences[slot] is seq
            assert scheduler.table.block_table[slot, : len(seq.blocks)].tolist() == seq.blocks
            assert scheduler.table.num_blocks[slot] == len(seq.blocks)
            assert scheduler.table.length[slot] == len(seq.tokens) + scheduler.table.pending[slot]
            assert len(seq.blocks) * 4 >= scheduler.table.computed[slot]

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        # No starvation: what is left ends within a bound that a fair scheduler keeps.
        left = sum(n * (len(p) + c) for p, c, n in self.given.values())
        for _ in range(20 * left + 100):
            if not self.engine.has_work:
                break
            self.run_step()
        assert not self.engine.has_work, "starvation"
        assert self.engine.scheduler.blocks.num_held == 0
        assert self.engine.scheduler.num_waiting == 0
        assert set(self.ended) == {(name, i) for name, (_, _, n) in self.given.items() for i in range(n)}
        for (name, index), reason in self.ended.items():
            prompt, count, _ = self.given[name]
            want = expected_tokens(prompt, count, self.setup.get("window"))
            got = self.tokens[name, index]
            if reason == "length":
                assert got == want
            else:
                assert reason == ("abort" if name in self.aborted else "error") or name in self.aborted
                assert got == want[: len(got)]


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.slow
class TestEngineLong(EngineMachine.TestCase):
    """The same, longer."""

    settings = settings(
        max_examples=1500, stateful_step_count=120, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
