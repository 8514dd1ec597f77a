"""What a backend declares is what it does: capabilities, constraints, the memory plan."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.core.backend import CompileAfterReadyError, StepLimits
from octavo.core.errors import ConfigError
from octavo.core.models.spec import model_params, weight_bytes
from octavo.core.sampling.params import sampling_fields
from octavo.core.step import dummy_step
from octavo.testing.kit import DeviceCase, Kit
from octavo.testing.models import tiny_spec
from octavo.testing.simulator import Simulator

LIMITS = StepLimits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, block_size=16)
LEAST = StepLimits(max_model_len=16, max_num_seqs=1, max_num_batched_tokens=16, block_size=16)
MODEL = tiny_spec()


@pytest.fixture(scope="module")
def loaded(kit):
    return kit.load(MODEL, LIMITS, num_blocks=24, warm=True)


def test_the_dtype_under_test_is_declared(kit):
    capabilities = kit.create().capabilities()
    capabilities.check_model(MODEL, kit.dtype, kit.dtype, capabilities.block_sizes[0])


def test_what_is_not_declared_is_refused(kit):
    capabilities = kit.create().capabilities()
    for dtype, kv_dtype, block_size in (("int3", kit.dtype, 16), (kit.dtype, "int3", 16), (kit.dtype, kit.dtype, 7)):
        with pytest.raises(ConfigError, match="supports"):
            capabilities.check_model(MODEL, dtype, kv_dtype, block_size)


def test_every_declared_dtype_works(kit):
    """Each dtype with itself and each other one for the cache: a step gives tokens, and exports have its size."""
    capabilities = kit.create().capabilities()
    for dtype in capabilities.dtypes:
        other = Kit(DeviceCase(kit.case.device, dtype, kit.case.options))
        for kv_dtype in capabilities.kv_dtypes:
            loaded = other.load(MODEL, LEAST, 8, kv_dtype=kv_dtype, warm=True)
            assert loaded.backend.kv_dtype(MODEL) == kv_dtype
            simulator = Simulator(loaded)
            stream = simulator.open()
            tokens = [int(simulator.run([(stream, [5, 6, 7])]).tokens[0])]
            tokens.append(int(simulator.run([(stream, tokens)]).tokens[0]))
            assert all(0 <= token < MODEL.vocab_size for token in tokens)
            loaded.backend.close()


def test_automatic_dtypes_are_declared(kit):
    backend = kit.create(dtype="auto")
    for dtype in ("float32", "bfloat16", "float16"):
        assert backend.dtype(replace(MODEL, dtype=dtype)) in backend.capabilities().dtypes


def test_sampling_fields_are_known(kit):
    assert set(kit.create().capabilities().sampling) <= set(sampling_fields())


def test_unknown_options_are_refused(kit):
    with pytest.raises(ConfigError, match="no option nonsense"):
        kit.create(options={"nonsense": "1"})


def test_every_declared_shape_runs(loaded):
    """After warm-up, once more: nothing is compiled."""
    constraints = loaded.backend.constraints(MODEL, LIMITS)
    shapes = constraints.shapes()
    for shape in shapes:
        longest = min(LIMITS.max_model_len, shape.blocks * LIMITS.block_size)
        step = dummy_step(shape, LIMITS.max_num_seqs, longest)
        output = loaded.backend.collect(loaded.backend.submit(step))
        assert output.tokens.shape == (shape.rows,)
        assert output.top_ids.shape == (
            shape.rows if shape.sampler.logprobs >= 0 else 0,
            max(shape.sampler.logprobs, 0),
        )


def test_other_shapes_are_refused_after_warmup(loaded):
    shapes = loaded.backend.constraints(MODEL, LIMITS).shapes()
    if not shapes:
        pytest.skip("the device takes any shape")
    largest = max(shapes, key=lambda s: s.tokens)
    for shape in (
        largest._replace(tokens=largest.tokens + 1),
        largest._replace(blocks=largest.blocks + 1),
        largest._replace(sampler=largest.sampler._replace(adjust=largest.sampler.adjust + 1)),
    ):
        with pytest.raises(CompileAfterReadyError):
            loaded.backend.submit(dummy_step(shape, LIMITS.max_num_seqs, LIMITS.block_size))


def test_buckets_reach_the_limits(kit):
    """Whatever the engine may schedule within the limits has a shape."""
    for limits in (LIMITS, StepLimits(1000, 48, 300, 16), StepLimits(1, 1, 1, 16)):
        constraints = kit.create().constraints(MODEL, limits)
        for sizes, tokens in ((constraints.decode, None), (constraints.prefill, limits.max_num_batched_tokens)):
            for declared, needed in (
                (sizes.sequences, limits.max_num_seqs),
                (sizes.blocks, limits.max_blocks),
                (sizes.tokens, tokens),
            ):
                if declared is not None:
                    assert list(declared) == sorted(set(declared))
                    assert needed is None or declared[-1] >= needed
        assert constraints.max_in_flight >= 1
        samplers = constraints.samplers
        assert samplers is None or samplers[0].greedy


def test_the_memory_plan_holds_the_weights(loaded):
    plan = loaded.backend.memory(MODEL, LIMITS)
    assert plan.weights >= sum(p.size for p in model_params(MODEL)) * (2 if loaded.dtype.endswith("16") else 4)
    assert plan.weights >= weight_bytes(MODEL, loaded.dtype)
    assert 0 <= plan.available <= plan.total
    assert 0 < plan.default_utilization <= 1
    assert plan.activations > 0


def test_the_memory_plan_grows_with_the_limits(kit):
    backend = kit.create()
    small = backend.memory(MODEL, LIMITS)
    large = backend.memory(MODEL, StepLimits(64, 64, 2048, 32))
    assert large.activations > small.activations
    assert large.block_bytes >= small.block_bytes * 2


def test_steps_give_the_same_tokens_again(loaded):
    """Same inputs, same cache: bit for bit the same output, so a retried step changes nothing."""
    simulator = Simulator(loaded)
    step = simulator.make([(simulator.open(), list(range(20)))])
    first = loaded.backend.collect(loaded.backend.submit(step))
    second = loaded.backend.collect(loaded.backend.submit(step))
    assert (first.tokens == second.tokens).all()


def test_inputs_may_be_overwritten_after_submit(loaded):
    """The engine builds the next step in the same arrays while this one runs."""
    simulator = Simulator(loaded)
    stream = simulator.open()
    step = simulator.make([(stream, list(range(30)))])
    want = loaded.backend.collect(loaded.backend.submit(step)).tokens.copy()
    handle = loaded.backend.submit(step)
    for array in (*step.inputs[:-1], *step.inputs.sampling):
        array[...] = np.zeros_like(array)
    assert (loaded.backend.collect(handle).tokens == want).all()
