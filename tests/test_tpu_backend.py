"""The TPU plugin: what its probe reads, which device is chosen, and the programs it makes (on JAX's CPU)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support import write_tree

from octavo.backends.tpu import TpuFactory
from octavo.backends.tpu.probe import find_chips, unfit_libtpu
from octavo.core import plugins
from octavo.core.backend import BackendConfig, CompileAfterReadyError, Hosts, StepLimits
from octavo.core.config import EngineConfig
from octavo.core.engine.memory import count_blocks
from octavo.core.engine.plan import Choices, make_plan
from octavo.core.errors import ConfigError, ContextTooLongError, DeviceError, OutOfMemoryError
from octavo.core.step import Step, StepShape, dummy_step
from octavo.testing import reference
from octavo.testing.kit import DeviceCase, Kit
from octavo.testing.models import tiny_spec
from octavo.testing.numbers import assert_close
from octavo.testing.simulator import Simulator

LIMITS = StepLimits(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64, block_size=16)
CASE = DeviceCase("tpu", options={"platform": "cpu"})
DEEP = tiny_spec(num_layers=6)


def jax():
    return pytest.importorskip("jax")


@pytest.fixture(scope="module")
def deep():
    """Enough layers that they run as a compiler's loop, warmed up."""
    jax()
    return Kit(CASE).load(DEEP, LIMITS, 64, num_host_blocks=4, warm=True)


# ------------------------------------------------------------------------------------------------ probing


@pytest.fixture
def host(tmp_path):
    """A host with two v5e chips and a network card of the same vendor."""
    for number, device in enumerate(("0x0063", "0x0063", "0x0042")):
        write_tree(tmp_path / f"sys/bus/pci/devices/{number}", vendor="0x1ae0\n", device=device + "\n")
    write_tree(tmp_path, dev__vfio__0="", dev__vfio__vfio="")
    return tmp_path


def test_chips_are_found(host):
    chips = find_chips(host)
    assert (chips.count, chips.name, chips.memory_bytes, chips.reasons) == (2, "TPU v5e", 16 << 30, ())


def test_no_chips(tmp_path):
    write_tree(tmp_path / "sys/bus/pci/devices/0", vendor="0x1ae0\n", device="0x0042\n")
    assert "no TPU chip" in find_chips(tmp_path).reasons[0]


def test_chips_out_of_a_containers_reach(host):
    (host / "dev/vfio/0").unlink()
    assert "give the container the devices" in find_chips(host).reasons[0]


def test_chips_that_another_process_holds(host):
    write_tree(host, tmp__libtpu_lockfile="", proc__locks="")
    assert find_chips(host).count == 2  # the file alone says nothing
    lock = os.stat(host / "tmp/libtpu_lockfile")
    where = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
    write_tree(host, proc__locks=f"1: FLOCK  ADVISORY  WRITE 4321 {where} 0 EOF\n")
    assert "process 4321" in find_chips(host).reasons[0]
    write_tree(host, proc__locks=f"1: FLOCK  ADVISORY  WRITE {os.getpid()} {where} 0 EOF\n")
    assert find_chips(host).count == 2


@pytest.mark.parametrize("package", ["jax", "libtpu"])
def test_a_missing_package_says_how_to_install_it(monkeypatch, host, package):
    monkeypatch.setattr("octavo.backends.tpu.find_chips", lambda: find_chips(host))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else object())
    probe = TpuFactory().probe()
    assert all(d.stands_in for d in probe.devices)
    assert f"needs {'JAX' if package == 'jax' else package}" in probe.reasons[0]
    assert "pip install 'octavo[tpu]'" in probe.reasons[0]


def test_a_libtpu_that_jax_does_not_want_is_remarked(monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ['libtpu==0.0.42.*; extra == "tpu"', "numpy>=2"])
    for have, remarks in (("0.0.42.1", 0), ("0.0.42", 0), ("0.0.421", 1), ("0.0.39", 1)):
        monkeypatch.setattr("importlib.metadata.version", lambda name, have=have: have)
        assert len(unfit_libtpu()) == remarks


def test_real_chips_come_first(monkeypatch, host):
    monkeypatch.setattr("octavo.backends.tpu.find_chips", lambda: find_chips(host))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("octavo.backends.tpu.unfit_libtpu", lambda: [])
    devices = TpuFactory().probe().devices
    assert [d.id for d in devices] == ["tpu", "tpu:cpu"]
    assert devices[0].details == {"chips": "2"}
    monkeypatch.setattr(plugins, "discover", lambda: [plugins.Found("tpu", TpuFactory(), TpuFactory().probe())])
    assert plugins.select("auto")[1].id == plugins.select("tpu")[1].id == "tpu"
    assert plugins.select("tpu", {"platform": "cpu"})[1].id == plugins.select("tpu:cpu")[1].id == "tpu:cpu"


def test_nobody_gets_the_simulation_who_asked_for_a_tpu(monkeypatch, tmp_path):
    monkeypatch.setattr("octavo.backends.tpu.find_chips", lambda: find_chips(tmp_path))
    jax()
    with pytest.raises(DeviceError, match=r"no TPU chip(.|\n)*--device tpu:cpu is JAX on the CPU"):
        plugins.select("tpu")
    assert plugins.select("auto")[0].name != "tpu"
    assert plugins.select("tpu", {"platform": "cpu"})[1].id == "tpu:cpu"


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("tpu:cpu", {"platform": "gpu"}, "must be one of"),
        ("tpu:cpu", {"platform": "tpu"}, "contradicts"),
        ("tpu", {"platform": "cpu"}, "contradicts"),
        ("tpu:cpu", {"tensor_parallel": "0"}, "tensor_parallel must be"),
        ("tpu", {"cpu_devices": "2"}, "platform=cpu only"),
        ("tpu:cpu", {"attention": "flash"}, "must be pallas or jnp"),
        ("tpu:cpu", {"attention": "pallas"}, "needs a TPU"),
        ("tpu:cpu", {"tensor_parallel": "64", "cpu_devices": "1"}, "needs 64 devices"),
    ],
)
def test_senseless_options_are_refused(device, options, message):
    jax()
    with pytest.raises(ConfigError, match=message):
        plugins.create(TpuFactory(), BackendConfig(device, options=options))


# ------------------------------------------------------------------------------------------------ programs


@pytest.mark.parametrize("devices", [1, 2])
def test_weights_in_blocks_of_128_columns_compute_the_model(devices):
    """As TPU7x likes them; all linear ones but `o`, whose 8 heads of 16 on two devices are 64 columns each."""
    jax()
    case = DeviceCase("tpu", options={"platform": "cpu", "tensor_parallel": str(devices)})
    model = tiny_spec(num_layers=6, hidden_size=128, intermediate_size=256, num_heads=8, num_kv_heads=2)
    loaded = Kit(case).load(model, LIMITS, 64)
    dimensions = {name: stack.ndim for name, stack in loaded.backend.params["layers"].items()}
    assert dimensions == {**dict.fromkeys(dimensions, 4), "attn_norm": 2, "mlp_norm": 2, "o": 4 if devices == 1 else 3}
    text = np.random.default_rng(3).integers(0, model.vocab_size, 50)
    simulator = Simulator(loaded)
    logits = simulator.logits([(simulator.open(), text.tolist())])
    assert_close(logits[0], reference.decoder(model, loaded.parameter, text)[-1], "float32", 32, "the last token")


def test_a_compilers_loop_over_the_layers_computes_the_model(deep):
    assert isinstance(deep.backend.params["layers"], dict)
    text = np.random.default_rng(3).integers(0, DEEP.vocab_size, 50)
    expected = reference.decoder(DEEP, deep.parameter, text)
    simulator = Simulator(deep)
    stream = simulator.open()
    for low, high in ((0, 30), (30, 31), (31, 49), (49, 50)):
        logits = simulator.logits([(stream, text[low:high].tolist())])
        assert_close(logits[0], expected[high - 1], "float32", 32, f"tokens to {high}")


def test_the_cache_is_updated_in_place(deep):
    """Donated and taken: the bytes that each program aliases are at least the cache's."""
    programs = deep.backend._compiler()
    shapes = deep.backend.constraints(DEEP, LIMITS).shapes()
    programs.compile([shapes[0], shapes[-1]])
    for program in programs.forwards.values():
        assert program.memory_analysis().alias_size_in_bytes == deep.backend.cache.layers.nbytes
        assert program.memory_analysis().temp_size_in_bytes < 400 << 20


def test_programs_are_forward_passes_plus_samplers(deep):
    programs = deep.backend._compiler()
    shapes = deep.backend.constraints(DEEP, LIMITS).shapes()
    # Tokens 16, 32, 64 and one decode; four samplers for the one number of rows.
    assert len(shapes) == 16
    programs.compile(shapes)
    assert (len(programs.forwards), len(programs.samplers)) == (4, 4)


def test_nothing_compiles_after_warmup(deep):
    """Counted where JAX compiles: steps of all shapes, copies, swaps."""
    monitoring = jax().monitoring
    compiled = []

    def count(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    monitoring.register_event_duration_secs_listener(count)
    try:
        backend = deep.backend
        jax().jit(lambda x: x + len(compiled))(np.arange(3))
        assert compiled  # the count works
        compiled.clear()
        for shape in backend.constraints(DEEP, LIMITS).shapes():
            backend.collect(backend.submit(dummy_step(shape, LIMITS.max_num_seqs, 16)))
        simulator = Simulator(deep, seed=5)
        streams = [simulator.open() for _ in range(5)]
        rng = np.random.default_rng(1)
        for count_of in (1, 3, 5, 2, 4):
            work = [(s, rng.integers(0, 199, int(rng.integers(1, 12))).tolist()) for s in streams[:count_of]]
            simulator.run(work)
            simulator.run([(s, [-1 - s.slot]) for s in streams[:count_of]])
        for blocks in ([1], [1, 2, 3], list(range(1, 41))):
            backend.copy_blocks(np.asarray(blocks[:20], np.int32), np.asarray(blocks[:20], np.int32) + 41)
            backend.export_blocks(np.asarray(blocks, np.int32))
        backend.swap_out(np.asarray([1, 2], np.int32), np.asarray([0, 3], np.int32))
        backend.swap_in(np.asarray([3], np.int32), np.asarray([5], np.int32))
        assert not compiled
    finally:
        monitoring.unregister_event_duration_listener(count)


def test_what_jax_compiles_by_itself_is_noticed(deep, monkeypatch):
    """In a call of the backend: an error, or counted. Anybody else's compilation is not its affair."""
    backend, late = deep.backend, deep.backend.late_compiles
    count = late.count

    def surprise(stack, blocks):
        return np.asarray(jax().jit(lambda x: x + late.count)(blocks))

    monkeypatch.setattr(backend._mover, "export", surprise)
    blocks = np.asarray([1, 2, 3], np.int32)
    surprise(None, blocks)
    assert late.count == count
    with pytest.raises(CompileAfterReadyError, match="JAX compiled 1 programs after the engine was ready"):
        backend.export_blocks(blocks)
    monkeypatch.setattr(late, "strict", False)
    assert backend.export_blocks(blocks) is not None
    assert late.count == count + 2


def test_shapes_that_cannot_occur_have_no_program():
    jax()
    constraints = TpuFactory().create(BackendConfig("tpu:cpu")).constraints(DEEP, StepLimits(4096, 256, 2048, 16))
    shapes = constraints.shapes()
    assert not [s for s in shapes if not s.decode and s.sequences > 8 and s.tokens <= s.sequences // 8]
    assert [s for s in shapes if s.tokens == 2048 and s.sequences == 256]
    programs = {s[:5] for s in shapes}
    assert len(programs) <= 60


CACHED = """
import jax
from octavo.testing.kit import Kit, DeviceCase
from octavo.testing.models import tiny_spec
from octavo.core.backend import StepLimits
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
case = DeviceCase("tpu", options={"platform": "cpu"})
Kit(case).load(tiny_spec(num_layers=6), StepLimits(16, 8, 16, 16), 4, warm=True)
print(len(hits))
"""


def test_programs_are_found_again_after_a_restart(tmp_path):
    jax()
    env = {**os.environ, "OCTAVO_CACHE": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "1"}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    run = [sys.executable, "-c", CACHED]
    first, second = (int(subprocess.run(run, env=env, capture_output=True, check=True).stdout) for _ in range(2))
    assert first == 0
    assert second >= 4


@pytest.mark.parametrize("decode", [True, False])
def test_the_kernel_is_called_as_it_is_meant_to_be(monkeypatch, decode):
    """Split over two devices, through the ops: what the interpreted kernel gives, jax.numpy gives as well."""
    jax()
    from jax.experimental.pallas import tpu as pallas_tpu

    from octavo.backends.tpu import ops as module

    interpreted = partial(module.ragged_attention, interpret=pallas_tpu.InterpretParams())
    monkeypatch.setattr(module, "ragged_attention", interpreted)
    case = DeviceCase("tpu", options={"platform": "cpu", "tensor_parallel": "2"})
    model = tiny_spec(num_heads=9, num_kv_heads=3, head_dim=24)  # padded to 12, 4 and 64
    loaded = Kit(case).load(model, LIMITS, 32)
    backend, local, rng = loaded.backend, loaded.local, np.random.default_rng(0)
    lengths, news = ((33, 1, 16), (1, 1, 1)) if decode else ((33, 1, 20), (17, 1, 9))
    slots = np.arange(16, 16 + 48 * 3)
    numbers = rng.standard_normal((2, len(slots), local.num_kv_heads, local.head_dim))
    loaded.write(slots, *numbers)
    tokens, sequences = (8, 8) if decode else (32, 8)
    step = dummy_step(StepShape(tokens, sequences, 4, 8, decode), 8, 1)
    starts = np.full(sequences + 1, sum(news), np.int32)
    starts[:4] = np.concatenate([[0], np.cumsum(news)])
    lens = np.asarray([*lengths, *[0] * (sequences - 3)], np.int32)
    tables = np.zeros((sequences, 4), np.int32)
    tables[:3, :3] = 1 + np.arange(9).reshape(3, 3)
    step = Step(step.shape, step.inputs._replace(query_start=starts, seq_lens=lens, block_tables=tables))
    q = loaded.array(rng.standard_normal((tokens, local.num_heads, local.head_dim)))
    results = []
    for kernel in (False, True):
        backend.ops = module.TpuOps(backend.mesh, backend.dtype, kernel)
        context = loaded.context(step)
        out = backend.ops.attention(q, None, None, loaded.layer_cache(0), context, None)
        results.append(loaded.numpy(out)[: sum(news)])
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=2e-6)


# ------------------------------------------------------------------------------------------------- memory


class Chip:
    """What JAX says of a chip's memory."""

    platform = "tpu"
    process_index = 0

    def __init__(self, stats):
        self.memory_stats = lambda: stats

    def __str__(self):
        return "TpuDevice(id=0)"


class Chips(TpuFactory):
    """A backend on chips that are not there, for what needs no computing."""

    def __init__(self, *stats):
        self.chips = [Chip(s) for s in stats]

    def create(self, config):
        from octavo.backends.tpu.backend import TpuBackend

        return TpuBackend(config, self.chips)


LLAMA_8B = tiny_spec(
    vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=14336, dtype="bfloat16", max_position=131072,
)  # fmt: skip
V5E = {"bytes_limit": 16 << 30, "bytes_in_use": 1 << 30}


def test_memory_is_that_of_all_chips():
    jax()
    assert Chips(V5E, V5E).create(BackendConfig("tpu")).device_memory() == (32 << 30, 30 << 30)


def test_memory_of_several_hosts_is_this_hosts_times_their_number():
    jax()
    elsewhere = Chips(V5E, V5E, V5E, None)  # what another host's chips have cannot be asked
    elsewhere.chips[3].process_index = elsewhere.chips[2].process_index = 1
    backend = elsewhere.create(BackendConfig("tpu", hosts=Hosts("host:1", 2, 0)))
    assert backend.device_memory() == (64 << 30, 60 << 30)


@pytest.mark.parametrize("stats", [None, {}])
def test_a_chip_that_does_not_tell_its_memory(stats):
    jax()
    with pytest.raises(DeviceError, match=r"TpuDevice\(id=0\) does not say how much memory it has"):
        Chips(stats).create(BackendConfig("tpu")).device_memory()


def test_a_model_too_big_for_the_mesh_says_how_many_chips_would_hold_it():
    """And with so many it fits."""
    jax()
    limits = StepLimits(8192, 64, 1024, 16)
    with pytest.raises(OutOfMemoryError, match=r"tensor_parallel=2\."):
        count_blocks(Chips(V5E).create(BackendConfig("tpu")).memory(LLAMA_8B, limits), limits, EngineConfig())
    plan = Chips(V5E, V5E).create(BackendConfig("tpu")).memory(LLAMA_8B, limits)
    assert count_blocks(plan, limits, EngineConfig()) > limits.max_blocks
    # 8.03e9 parameters of 2 bytes; every chip has its own norms and rotary table, and nothing else twice.
    assert 2 * 8.03e9 < plan.weights < 2 * 8.04e9


@pytest.mark.parametrize(
    ("limits", "advice"),
    [
        (StepLimits(131072, 256, 2048, 16), r"--max-model-len 8192 or --max-num-seqs 16 would do"),
        (StepLimits(16384, 256, 2048, 16), r"--max-model-len 8192 .*--block-size 32"),
    ],
)
def test_block_tables_beyond_scalar_memory_are_refused(limits, advice):
    """And what is advised is taken."""
    jax()
    backend = Chips(V5E).create(BackendConfig("tpu"))
    with pytest.raises(ConfigError, match=rf"bytes of a TPU's scalar memory.*{advice}") as refused:
        backend.constraints(LLAMA_8B, limits)
    fields = {"--max-model-len": "max_model_len", "--max-num-seqs": "max_num_seqs", "--block-size": "block_size"}
    for flag, number in re.findall(
        r"(--max-model-len|--max-num-seqs|--block-size) (\d+)(?: or|,| would)", str(refused.value)
    ):
        backend.constraints(LLAMA_8B, replace(limits, **{fields[flag]: int(number)}))
    backend.constraints(LLAMA_8B, StepLimits(8192, 256, 2048, 16))
    # Only the kernel reads them from there.
    Chips(V5E).create(BackendConfig("tpu", options={"attention": "jnp"})).constraints(LLAMA_8B, limits)


def test_a_context_that_nobody_asked_for_is_shortened_to_what_scalar_memory_holds():
    jax()
    backend, choices = Chips({**V5E, "bytes_limit": 96 << 30}).create(BackendConfig("tpu")), Choices()
    plan = make_plan(EngineConfig(), LLAMA_8B, backend, "tpu", choices)
    assert plan.limits.max_model_len == 8192
    assert any("--max-model-len is 8192. Block tables" in choice for choice in choices.made)
    with pytest.raises(ContextTooLongError):
        make_plan(EngineConfig(max_model_len=131072), LLAMA_8B, backend, "tpu", Choices())
