"""The engine core on a backend that hashes the whole context: every mistake in paging changes tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hash_backend import VOCAB, HashBackend, expected_tokens, tiny_spec

from octavo.core.backend import Buckets, StepConstraints, StepLimits
from octavo.core.engine.engine import EngineCore
from octavo.core.engine.types import EngineInfo, EngineRequest
from octavo.core.errors import RequestError, UnavailableError
from octavo.core.sampling.params import SamplingParams
from octavo.core.step import SamplerShape

STATIC = StepConstraints(
    decode=Buckets(sequences=(1, 2, 4, 8), blocks=(4, 16, 64)),
    prefill=Buckets(tokens=(8, 32), sequences=(1, 4), blocks=(4, 16, 64)),
    mixed=False,
    samplers=(SamplerShape(), SamplerShape(False, True, 300, 4)),
    max_in_flight=2,
)


def make_engine(constraints=None, num_blocks=65, host_blocks=0, block_size=4, window=None, eos=(), **options):
    constraints = constraints or StepConstraints()
    spec = tiny_spec(256, window, eos)
    limits = StepLimits(256, options.pop("max_num_seqs", 8), options.pop("budget", 64), block_size)
    backend = HashBackend(spec, constraints)
    backend.init_cache(limits, num_blocks, host_blocks)
    info = EngineInfo(
        "hash", "hash", "hash", "float32", "float32", VOCAB, list(eos), 256, limits.max_num_seqs, 64, block_size,
        num_blocks - 1, 1, 0, [], [],
    )  # fmt: skip
    return EngineCore(backend, info, limits, constraints, num_blocks, host_blocks, **options)


def greedy(count, **more):
    return SamplingParams(temperature=0.0, max_tokens=count, **more)


def run(engine, limit=100_000):
    """Steps until there is nothing to do; returns {(request, index): (tokens, reason)}."""
    results = {}
    for _ in range(limit):
        if not engine.has_work:
            break
        for out in engine.step():
            tokens, _ = results.get((out.request_id, out.index), ([], None))
            results[out.request_id, out.index] = (tokens + out.token_ids, out.finish_reason)
    assert engine.backend.violation is None
    assert not engine.has_work, "the engine does not come to an end"
    assert engine.scheduler.blocks.num_held == 0
    assert engine.scheduler.num_waiting == engine.scheduler.num_running == 0
    return results


def prompts(rng, count, low=1, high=60):
    return [rng.integers(0, VOCAB, rng.integers(low, high)).tolist() for _ in range(count)]


VARIANTS = {
    "plain": {},
    "in flight 2": {"constraints": StepConstraints(max_in_flight=2)},
    "in flight 3": {"constraints": StepConstraints(max_in_flight=3)},
    "separate": {"constraints": StepConstraints(mixed=False)},
    "static": {"constraints": STATIC},
    "small budget": {"budget": 5},
    "tiny budget": {"budget": 1},
    "no prefix cache": {"prefix_caching": False},
    "whole prompts": {"chunked_prefill": False, "budget": 256},
    "preempt, recompute": {"num_blocks": 27},
    "preempt, recompute, in flight 2": {"num_blocks": 27, "constraints": StepConstraints(max_in_flight=2)},
    "preempt, swap": {"num_blocks": 27, "host_blocks": 40},
    "preempt, swap, static": {"num_blocks": 27, "host_blocks": 12, "constraints": STATIC},
    "window": {"window": 9},
    "window, preempt": {"window": 9, "num_blocks": 27},
    "window, swap, in flight": {
        "window": 9, "num_blocks": 27, "host_blocks": 40, "constraints": StepConstraints(max_in_flight=2),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(4))
def test_tokens_do_not_depend_on_how_they_were_scheduled(name, seed):
    options = dict(VARIANTS[name])
    engine = make_engine(**options)
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 13).tolist()
    given = {}
    for i, own in enumerate(prompts(rng, 30)):
        prompt = shared + own if i % 3 == 0 else own
        n = 3 if i % 5 == 0 else 1
        count = int(rng.integers(1, 30))
        given[f"r{i}"] = (prompt, count, n)
        engine.add_request(EngineRequest(f"r{i}", prompt, greedy(count, n=n), priority=int(rng.integers(0, 3))))
        if i % 4 == 0 and engine.has_work:
            for _ in range(int(rng.integers(0, 4))):
                for out in engine.step():
                    given.setdefault("early", []).append(out)
    early = given.pop("early", [])
    results = {}
    for out in early:
        tokens, _ = results.get((out.request_id, out.index), ([], None))
        results[out.request_id, out.index] = (tokens + out.token_ids, out.finish_reason)
    for key, (tokens, reason) in run(engine).items():
        results[key] = (results.get(key, ([], None))[0] + tokens, reason)
    for request, (prompt, count, n) in given.items():
        want = expected_tokens(prompt, count, options.get("window"))
        for index in range(n):
            assert results[request, index] == (want, "length"), (request, index)
    if name.startswith("preempt"):
        assert engine.stats().preemptions > 0


def test_an_equal_prefix_is_computed_once():
    engine = make_engine(num_blocks=400, budget=64, max_num_seqs=32, block_size=16)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, 128).tolist()
    for i in range(32):
        engine.add_request(EngineRequest(f"r{i}", shared + rng.integers(0, VOCAB, 20).tolist(), greedy(1)))
    run(engine)
    assert engine.stats().computed_tokens == 128 + 32 * 20
    assert engine.stats().prefix_hits == 31 * 128


def test_completions_of_one_request_compute_its_prompt_once_without_prefix_cache():
    engine = make_engine(prefix_caching=False)
    prompt = list(range(50))
    engine.add_request(EngineRequest("r", prompt, greedy(9, n=5)))
    results = run(engine)
    assert all(results["r", i][0] == expected_tokens(prompt, 9) for i in range(5))
    assert engine.stats().computed_tokens == 50 + 4 + 5 * 8  # four completions compute the last prompt token again


def test_stop_tokens_and_end_of_sequence():
    prompt = [5, 6, 7]
    tokens = expected_tokens(prompt, 40)
    eos, stop = tokens[10], tokens[4]
    engine = make_engine(eos=(eos,))
    engine.add_request(EngineRequest("eos", prompt, greedy(40)))
    engine.add_request(EngineRequest("stop", prompt, greedy(40, stop_token_ids=[stop])))
    engine.add_request(EngineRequest("ignore", prompt, greedy(40, ignore_eos=True)))
    results = run(engine)
    assert results["eos", 0] == (tokens[: tokens.index(eos) + 1], "stop")
    assert results["stop", 0] == (tokens[: tokens.index(stop) + 1], "stop")
    assert results["ignore", 0] == (tokens, "length")


@pytest.mark.parametrize("in_flight", [1, 2])
def test_abort_at_any_moment_frees_everything(in_flight):
    for after in range(12):
        engine = make_engine(StepConstraints(max_in_flight=in_flight), num_blocks=20, host_blocks=10)
        rng = np.random.default_rng(after)
        for i, prompt in enumerate(prompts(rng, 10)):
            engine.add_request(EngineRequest(f"r{i}", prompt, greedy(20, n=1 + i % 2)))
        seen = []
        for _ in range(after):
            seen += engine.step()
        for i in range(10):
            engine.abort(f"r{i}")
            engine.abort(f"r{i}")
        while engine.has_work:
            seen += engine.step()
        assert engine.scheduler.blocks.num_held == 0
        ends = [(o.request_id, o.index) for o in seen if o.finish_reason]
        assert sorted(ends) == sorted({(f"r{i}", k) for i in range(10) for k in range(1 + i % 2)})


def test_a_failed_step_ends_its_requests_only():
    engine = make_engine(max_num_seqs=2)
    engine.backend.fail_at = {3}
    for i in range(6):
        engine.add_request(EngineRequest(f"r{i}", [i, i + 1, i + 2], greedy(5)))
    results = run(engine)
    reasons = [results[f"r{i}", 0][1] for i in range(6)]
    assert reasons == ["error", "error"] + ["length"] * 4
    for i in range(2, 6):
        assert results[f"r{i}", 0][0] == expected_tokens([i, i + 1, i + 2], 5)


def test_a_device_that_keeps_failing_is_given_up():
    engine = make_engine()
    engine.backend.fail_at = set(range(100))
    for i in range(2):
        engine.add_request(EngineRequest(f"r{i}", [1, 2], greedy(5)))
        engine.step()
    engine.add_request(EngineRequest("last", [1, 2], greedy(5)))
    with pytest.raises(RuntimeError, match="stumbled"):
        engine.step()


def test_prompt_logprobs_cover_every_prompt_token_once():
    for options in ({}, {"budget": 7}, {"constraints": STATIC}, {"num_blocks": 27}):
        engine = make_engine(**options)
        prompt = list(range(1, 40))
        for i in range(4):
            engine.add_request(EngineRequest(f"r{i}", prompt, greedy(30, prompt_logprobs=0)))
        seen = {}
        while engine.has_work:
            for out in engine.step():
                if out.prompt_logprobs is not None:
                    assert out.request_id not in seen
                    seen[out.request_id] = [p.token for p in out.prompt_logprobs]
        assert seen == {f"r{i}": prompt[1:] for i in range(4)}, options


def test_higher_priority_runs_first_and_equal_ones_in_order_of_arrival():
    engine = make_engine(max_num_seqs=1)
    for i, priority in enumerate([1, 0, 1, 0, -1]):
        engine.add_request(EngineRequest(f"r{i}", [i], greedy(2), priority=priority))
    order = []
    while engine.has_work:
        order += [o.request_id for o in engine.step() if o.finish_reason]
    assert order == ["r4", "r1", "r3", "r0", "r2"]


def test_decodes_go_on_while_long_prompts_are_computed():
    for constraints in (StepConstraints(), StepConstraints(mixed=False), STATIC):
        engine = make_engine(constraints, budget=32, num_blocks=200)
        engine.add_request(EngineRequest("chat", [1, 2, 3], greedy(100)))
        for _ in range(4):
            engine.step()
        for i in range(3):
            engine.add_request(EngineRequest(f"long{i}", [i] * 200, greedy(1)))
        gaps, gap, ended = [], 0, set()
        for _ in range(30):
            outputs = engine.step()
            gap = 0 if any(o.request_id == "chat" for o in outputs) else gap + 1
            gaps.append(gap)
            ended |= {o.request_id for o in outputs if o.finish_reason}
        assert max(gaps) <= 2
        assert len(ended) + len(run(engine)) == 4


@pytest.mark.parametrize(
    ("prompt", "params", "match"),
    [
        ([], {}, "empty"),
        ([1] * 256, {}, "longest is 255"),
        ([VOCAB], {}, "outside 0 to 96"),
        ([-1], {}, "outside"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias names token 97"),
        ([1], {"stop_token_ids": [1000]}, "stop_token_ids names"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(prompt, params, match):
    engine = make_engine()
    with pytest.raises(RequestError, match=match):
        engine.add_request(EngineRequest("r", prompt, SamplingParams(**params)))
    assert not engine.has_work


def test_what_no_compiled_sampler_covers_is_refused():
    engine = make_engine(STATIC)
    with pytest.raises(RequestError, match="do not cover"):
        engine.add_request(EngineRequest("r", [1], SamplingParams(logprobs=5)))


def test_a_full_queue_and_a_used_id_are_refused():
    engine = make_engine(max_waiting=2)
    engine.add_request(EngineRequest("a", [1], greedy(1)))
    with pytest.raises(RequestError, match="under way"):
        engine.add_request(EngineRequest("a", [1], greedy(1)))
    engine.add_request(EngineRequest("b", [1], greedy(1)))
    with pytest.raises(UnavailableError, match="queue is full"):
        engine.add_request(EngineRequest("c", [1], greedy(1)))
    assert len(run(engine)) == 2


def test_late_compiles_of_the_backend_are_in_the_stats():
    engine = make_engine()
    assert engine.stats().late_compiles == 0
    engine.backend.late_compiles.strict = False
    engine.backend.late_compiles.add("Two programs were made", 2)
    assert engine.stats().late_compiles == 2
