"""The factories of the built-in backends, the null backend, the static reference, and the host's memory."""

import subprocess
import sys
import time

import numpy as np
import pytest
from support import write_tree

from octavo.backends.cpu import CpuFactory
from octavo.backends.cpu.cpuinfo import CpuInfo, cpu_info
from octavo.backends.cpu.mps import MpsFactory
from octavo.backends.host import host_memory, host_threads
from octavo.backends.null import NullFactory
from octavo.backends.reference import ReferenceFactory
from octavo.backends.reference.checks import StepError
from octavo.backends.reference.static import ladder
from octavo.core import plugins
from octavo.core.backend import BackendConfig, CompileAfterReadyError, StepLimits
from octavo.core.errors import ConfigError
from octavo.core.late import LateCompiles
from octavo.core.step import SamplerShape, StepShape, dummy_step
from octavo.testing.kit import DeviceCase, Kit
from octavo.testing.models import RandomWeights, tiny_spec
from octavo.testing.simulator import Simulator

LIMITS = StepLimits(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64, block_size=16)
MODEL = tiny_spec(eos_token_ids=(2,))


def test_probing_imports_no_array_library():
    code = (
        "import sys; from octavo.core import plugins; plugins.discover(); assert not {'torch', 'jax'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_automatic_device_is_never_a_test_device():
    assert ReferenceFactory.auto_priority < 0
    assert NullFactory.auto_priority < 0
    assert plugins.select("auto")[0].name in ("cpu", "mps")


def test_cpu_without_torch_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    probe = CpuFactory().probe()
    assert not probe.devices
    assert "pip install 'octavo[cpu]'" in probe.reasons[0]


@pytest.mark.skipif(sys.platform == "darwin", reason="may have one")
def test_mps_says_why_it_is_not_there():
    probe = MpsFactory().probe()
    assert not probe.devices
    assert "Apple Silicon" in probe.reasons[0]


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (CpuFactory(), {"threads": "0"}),
        (CpuFactory(), {"threads": "many"}),
        (NullFactory(), {"latency_ms": "-1"}),
        (NullFactory(), {"latency_ms": "soon"}),
        (ReferenceFactory(), {"static": "yes"}),
    ],
)
def test_senseless_options_are_refused(factory, options):
    with pytest.raises(ConfigError, match="must be"):
        plugins.create(factory, BackendConfig(factory.name, options=options))


def test_cpu_dtype_follows_the_instructions(monkeypatch):
    pytest.importorskip("torch")
    backend = CpuFactory().create(BackendConfig("cpu", options={"kernels": "torch"}))
    for features, dtype, expected in (
        (("avx2",), "bfloat16", "float32"),
        (("avx512_bf16",), "bfloat16", "bfloat16"),
        (("avx512_bf16",), "float16", "float32"),
        (("avx512_bf16",), "float32", "float32"),
    ):
        monkeypatch.setattr("octavo.backends.cpu.backend.cpu_info", lambda f=features: CpuInfo("", 1, f))
        assert backend.pick_dtype(tiny_spec(dtype=dtype)) == expected


def test_cpu_info_of_linux(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("model name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16\n\nflags\t\t: fpu\n")
    info = cpu_info(path)
    assert (info.name, info.features, info.native_bfloat16) == ("Some CPU", ("avx2", "amx_bf16"), True)
    path.write_text("Features\t: fp asimd\n")
    assert not cpu_info(path).native_bfloat16
    assert cpu_info(tmp_path / "none").features == ()


# ------------------------------------------------------------------------------------------------ memory


@pytest.fixture
def root(tmp_path):
    write_tree(tmp_path, proc__meminfo="MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 800 kB\n")
    return tmp_path


def test_memory_of_the_machine(root):
    assert host_memory(root) == (1000 * 1024, 800 * 1024)


def test_memory_in_a_group_of_version_2(root):
    write_tree(root, proc__self__cgroup="0::/a/b\n")
    base = root / "sys/fs/cgroup"
    for group, limit in (("a/b", "max"), ("a", "500000")):
        (base / group).mkdir(parents=True, exist_ok=True)
        (base / group / "memory.max").write_text(limit)
        (base / group / "memory.current").write_text("300000")
        (base / group / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert host_memory(root) == (500_000, 300_000)


def test_memory_in_a_group_of_version_1(root):
    write_tree(root, proc__self__cgroup="5:cpu:/x\n4:memory,foo:/not/visible\n")
    base = root / "sys/fs/cgroup/memory"
    base.mkdir(parents=True)
    (base / "memory.limit_in_bytes").write_text("600000")
    (base / "memory.usage_in_bytes").write_text("100000")
    (base / "memory.stat").write_text("total_inactive_file 0\n")
    assert host_memory(root) == (600_000, 500_000)


# ------------------------------------------------------------------------------------------------ threads


def test_a_thread_for_each_core(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.backends.host.usable_cpus", lambda: [0, 1, 2, 3, 6])
    assert host_threads(tmp_path) == 5
    for cpu, siblings in enumerate(("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")):
        write_tree(tmp_path / f"sys/devices/system/cpu/cpu{cpu}", topology__thread_siblings_list=siblings + "\n")
    assert host_threads(tmp_path) == 4


@pytest.mark.parametrize(("quota", "threads"), [("max 100000", 8), ("250000 100000", 3), ("1000 100000", 1), ("x", 8)])
def test_a_quota_of_version_2(tmp_path, monkeypatch, quota, threads):
    monkeypatch.setattr("octavo.backends.host.usable_cpus", lambda: range(8))
    write_tree(tmp_path, proc__self__cgroup="0::/a/b\n")
    write_tree(tmp_path / "sys/fs/cgroup/a", **{"cpu.max": quota})
    assert host_threads(tmp_path) == threads


@pytest.mark.parametrize(("quota", "threads"), [("-1", 8), ("200000", 2)])
def test_a_quota_of_version_1(tmp_path, monkeypatch, quota, threads):
    monkeypatch.setattr("octavo.backends.host.usable_cpus", lambda: range(8))
    write_tree(tmp_path, proc__self__cgroup="4:cpu,cpuacct:/a\n")
    write_tree(tmp_path / "sys/fs/cgroup/cpu/a", **{"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": "100000\n"})
    assert host_threads(tmp_path) == threads


def test_memory_without_proc(tmp_path):
    total, available = host_memory(tmp_path)
    assert 0 < available <= total


# ------------------------------------------------------------------------------------------------ null


def null(latency="0"):
    backend = NullFactory().create(BackendConfig("null", options={"latency_ms": latency}))
    backend.load(MODEL, RandomWeights())
    backend.init_cache(LIMITS, 1000)
    return backend


def test_null_tokens_follow_from_the_one_before():
    backend = null()
    step = dummy_step(StepShape(3, 3, 1, 3, True, SamplerShape(logprobs=2)), 8, 16)
    step.inputs.token_ids[:] = [5, 6, 7]
    step.inputs.logits_rows[:] = [0, 1, 2]
    step.inputs.sampling.out_slots[:] = [4, 0, 1]
    first = backend.collect(backend.submit(step))
    assert first.top_ids.shape == (3, 2)
    assert len(set(first.tokens.tolist())) == 3
    step.inputs.token_ids[:] = [-5, -1, -2]
    later = backend.collect(backend.submit(step))
    step.inputs.token_ids[:] = first.tokens
    assert (backend.collect(backend.submit(step)).tokens == later.tokens).all()


def test_null_never_ends_a_sequence():
    backend = null()
    step = dummy_step(StepShape(8, 8, 1, 8, True), 8, 16)
    for token in range(0, MODEL.vocab_size, 8):
        step.inputs.token_ids[:] = np.arange(token, token + 8)
        tokens = backend.collect(backend.submit(step)).tokens
        assert (tokens != 2).all()
        assert ((tokens >= 0) & (tokens < MODEL.vocab_size)).all()


def test_null_takes_the_time_it_is_told_to():
    backend = null("20")
    step = dummy_step(StepShape(1, 1, 1, 1, True), 8, 16)
    start = time.monotonic()
    handles = [backend.submit(step), backend.submit(step)]
    assert time.monotonic() - start < 0.015
    for handle in handles:
        backend.collect(handle)
    assert time.monotonic() - start > 0.039


# ------------------------------------------------------------------------------------------------ static shapes


@pytest.fixture(scope="module")
def static():
    return Kit(DeviceCase("reference", options={"static": "1"})).load(MODEL, LIMITS, 24, warm=True)


def test_ladder():
    assert ladder(1, 1) == (1,)
    assert ladder(1, 8) == (1, 8)
    assert ladder(16, 2048) == (16, 128, 1024, 2048)
    assert ladder(16, 3) == (16,)
    assert ladder(1, 100) == (1, 8, 64, 128)


def test_static_compiles_each_shape_once(static):
    shapes = static.backend.constraints(MODEL, LIMITS).shapes()
    assert static.backend.programs == len(shapes) == len(set(shapes))
    with pytest.raises(CompileAfterReadyError):
        static.backend.compile(shapes[0])


def test_a_program_that_is_missing_is_an_error_or_made_with_a_warning(static, caplog):
    backend = static.backend
    shape = backend.constraints(MODEL, LIMITS).shapes()[0]
    step, program = dummy_step(shape, LIMITS.max_num_seqs, 1), backend._programs.pop(shape)
    late = backend.late_compiles
    try:
        with pytest.raises(CompileAfterReadyError, match=r"StepShape.* was needed after the engine was ready"):
            backend.submit(step)
        late.count, late.strict, backend.ready = 0, False, False
        for _ in range(2):
            assert backend.collect(backend.submit(step)).tokens.shape == (shape.rows,)
        assert late.count == 1
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert "Please report it" in caplog.text
    finally:
        late.strict, backend.ready, backend._programs[shape] = True, True, program


def test_late_compiles_are_strict_by_environment(monkeypatch):
    assert LateCompiles().strict
    monkeypatch.setenv("OCTAVO_LATE_COMPILE", "warn")
    assert not LateCompiles().strict
    monkeypatch.setenv("OCTAVO_LATE_COMPILE", "never")
    with pytest.raises(ConfigError, match='must be "warn" or "error", not'):
        LateCompiles()


BREAKS = {
    "token_ids is int64": lambda i: i._replace(token_ids=i.token_ids.astype(np.int64)),
    "seq_lens has shape": lambda i: i._replace(seq_lens=i.seq_lens[:-1]),
    "token id is outside": lambda i: i._replace(token_ids=i.token_ids + MODEL.vocab_size),
    "positions do not follow": lambda i: i._replace(positions=i.positions + 1),
    "slot is outside": lambda i: i._replace(slot_mapping=i.slot_mapping + 10**6),
    "disagrees with the block": lambda i: i._replace(slot_mapping=i.slot_mapping + (i.token_ids == 3)),
    "outside the null block": lambda i: i._replace(slot_mapping=np.maximum(i.slot_mapping, 16)),
    "cache does not have": lambda i: i._replace(block_tables=i.block_tables + 24),
    "padded sequence has blocks": lambda i: i._replace(block_tables=np.maximum(i.block_tables, 1)),
    "begin with 0": lambda i: i._replace(query_start=i.query_start + 1),
    "mixed=False": lambda i: i._replace(token_ids=i.token_ids - 8),
    "logits row has no token": lambda i: i._replace(logits_rows=i.logits_rows + 1000),
    "given a row with a temperature": lambda i: i._replace(
        sampling=i.sampling._replace(temperature=i.sampling.temperature + 1)
    ),
}


@pytest.mark.parametrize("message", BREAKS)
def test_static_checks_its_inputs(static, message):
    static.reset_cache()
    simulator = Simulator(static)
    step = simulator.make([(simulator.open(), [3, 4, 5, 6]), (simulator.open(), [7] * 9)])
    static.backend.submit(step)
    with pytest.raises(StepError, match=message):
        static.backend.submit(type(step)(step.shape, BREAKS[message](step.inputs)))


def test_static_refuses_decodes_among_prefills(static):
    """A decoding sequence shows by the token that the device has and the host has not."""
    static.reset_cache()
    simulator = Simulator(static)
    stream = simulator.open()
    simulator.run([(stream, [3, 4])])
    with pytest.raises(StepError, match="mixed"):
        simulator.run([(stream, [-1]), (simulator.open(), [1, 2, 3])])
