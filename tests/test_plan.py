"""`octavo plan` says what the engine then is, and the advice in its refusals works."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from octavo.core.config import EngineConfig
from octavo.core.engine.build import build_engine
from octavo.core.errors import ConfigError, OutOfMemoryError
from octavo.server.plan import describe


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A directory with a tiny Llama."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=512,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cpu", "kv_cache_memory": 1 << 20},
        {"device": "cpu", "memory_utilization": 0.05, "max_num_seqs": 4},
        {"device": "reference", "backend_option": {"static": "1"}, "max_num_seqs": 4, "max_model_len": 100},
        {"device": "reference", "dtype": "float64", "kv_cache_memory": 100_000},
        {"device": "cpu", "kv_cache_memory": 1 << 20, "quantization": "int8", "threads": 1},
    ],
)
def test_the_plan_is_what_the_engine_becomes(tiny, options):
    config = EngineConfig(model=tiny, **options)
    plan = describe(config)
    assert plan["fits"]
    engine = build_engine(config)
    info = engine.info
    for key in ("device", "dtype", "block_size", "kv_blocks", "max_model_len"):
        assert plan[key] == getattr(info, key), key
    assert plan["memory"]["kv_block"] == info.kv_block_bytes
    assert plan["choices"] == info.choices
    assert plan["programs_to_compile"] == getattr(engine.backend, "programs", 0)
    engine.close()


def test_what_does_not_fit_is_refused_with_what_would(tiny):
    config = {"model": tiny, "device": "cpu", "kv_cache_memory": 40_000}
    plan = describe(EngineConfig(**config, max_model_len=512))
    assert not plan["fits"]
    advised = int(re.search(r"Lower it to (\d+)", plan["why"]).group(1))
    with pytest.raises(OutOfMemoryError):
        build_engine(EngineConfig(**config, max_model_len=512))
    assert describe(EngineConfig(**config, max_model_len=advised))["fits"]
    build_engine(EngineConfig(**config, max_model_len=advised)).close()


def test_whole_prompts_need_room_in_a_step(tiny):
    with pytest.raises(ConfigError, match=r"needs --max-num-batched-tokens of at least the context length \(512\)"):
        describe(EngineConfig(model=tiny, device="cpu", chunked_prefill=False, max_num_batched_tokens=100))


@pytest.mark.parametrize(("option", "value"), [("kv_cache_dtype", "bfloat16"), ("block_size", 7)])
def test_what_the_device_cannot_do_is_refused(tiny, option, value):
    flag = "--" + option.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} {value} is not supported by this device; it supports"):
        describe(EngineConfig(model=tiny, device="reference", **{option: value}))


@pytest.mark.parametrize(("option", "value"), [("quantization", "int8"), ("threads", 2)])
def test_flags_for_the_plugin_are_refused_where_it_has_no_such_option(tiny, option, value):
    with pytest.raises(ConfigError, match=f"--{option} is not supported by reference"):
        describe(EngineConfig(model=tiny, device="reference", **{option: value}))


def test_a_flag_and_an_option_must_agree(tiny):
    same = {"threads": 2, "backend_option": {"threads": "2", "kernels": "torch"}}
    assert EngineConfig(**same).backend_options() == {"threads": "2", "kernels": "torch"}
    with pytest.raises(ConfigError, match=r"--threads 3 and --backend-option threads=2 differ"):
        describe(EngineConfig(model=tiny, device="cpu", **(same | {"threads": 3})))


def test_the_command_prints_it_and_its_exit_code_tells(tiny):
    command = [sys.executable, "-m", "octavo.server", "plan", tiny, "--device", "cpu", "--json"]
    command += ["--backend-option", "kernels=torch"]  # compiled kernels round heads of 8 up to whole registers
    fits = subprocess.run([*command, "--kv-cache-memory", "1MiB"], capture_output=True, text=True, check=True)
    assert json.loads(fits.stdout)["sequences_at_length"]["512"] == 7  # 255 blocks of 4 KiB
    refused = subprocess.run([*command, "--kv-cache-memory", "9000GiB"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["fits"] is False
