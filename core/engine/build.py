"""Puts an engine together: device, model, plan, weights, cache, warm-up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .. import hub
from ..config import EngineConfig
from ..errors import ConfigError
from ..executor.executor import Executor
from ..executor.facts import facts
from ..executor.follower import follow
from ..executor.leader import Leader
from ..models.loader import LoadedModel, open_model
from .engine import EngineCore
from .plan import Choices, choose_device, create_backend, hosts_of, make_plan
from .types import EngineInfo

Progress = Callable[[str, int, int], None]


def build_engine(
    config: EngineConfig, progress: Progress | None = None, log: Callable[[str], None] | None = None
) -> EngineCore:
    """Builds an engine that is ready to take requests.

    Args:
        config: what to build.
        progress: called with (what, done, in all) while weights load and programs compile.
        log: called with each choice that was left to the engine, a sentence at a time.

    Raises:
        OctavoError: whatever stands in the way, with what to change.
    """
    if config.host_rank:
        raise ConfigError(
            f"The engine is on rank 0, and --host-rank {config.host_rank} follows it: on this host run `octavo serve` "
            "with the same options."
        )
    model = open_model(hub.resolve(config.model, config.revision), config.tokenizer)
    factory, info = choose_device(config)
    create, device = partial(create_backend, config, factory, info), info.id
    hosts = hosts_of(config)
    backend: Executor
    if hosts is None:
        backend = create()
    else:
        backend = Leader(hosts, facts(config, device, model.spec), create, log or (lambda line: None))
    try:
        return _build(config, model, backend, device, progress, Choices(log))
    except BaseException as error:
        if isinstance(backend, Leader):
            backend.close(str(error) or type(error).__name__)
        else:
            backend.close()
        raise


def follow_engine(config: EngineConfig, log: Callable[[str], None], on_joined: Callable[[], None]) -> None:
    """Runs this host as a follower of rank 0's engine, until that ends in order.

    Args:
        config: as on rank 0, with this host's rank.
        log: called with what happens, a sentence at a time.
        on_joined: called once all hosts are there.

    Raises:
        OctavoError: rank 0 refused this host, or has ended; or what stands in the way here.
    """
    hosts = hosts_of(config)
    assert hosts is not None
    assert hosts.rank > 0
    model = open_model(hub.resolve(config.model, config.revision), config.tokenizer)
    factory, info = choose_device(config)
    create = partial(create_backend, config, factory, info)
    follow(hosts, facts(config, info.id, model.spec), create, model.spec, lambda: model.weights, log, on_joined)


def _build(
    config: EngineConfig,
    model: LoadedModel,
    backend: Executor,
    device: str,
    progress: Progress | None,
    choices: Choices,
) -> EngineCore:
    spec = model.spec
    plan = make_plan(config, spec, backend, device, choices)
    limits = plan.limits

    def report(what: str) -> Callable[[int, int], None] | None:
        return (lambda done, total: progress(what, done, total)) if progress else None

    backend.load(spec, model.weights, report("loading weights"))
    backend.init_cache(limits, plan.num_blocks, plan.num_host_blocks)
    backend.warmup(plan.constraints.shapes(), report("warming up"))
    info = EngineInfo(
        model=config.served_model_name or model.name,
        family=spec.family,
        device=device,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        vocab_size=spec.vocab_size,
        eos_token_ids=list(spec.eos_token_ids),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        kv_blocks=plan.num_blocks - 1,
        kv_block_bytes=plan.memory.block_bytes,
        weight_bytes=plan.memory.weights,
        sampling=list(backend.capabilities().sampling),
        choices=choices.made,
    )
    return EngineCore(
        backend,
        info,
        limits,
        plan.constraints,
        plan.num_blocks,
        plan.num_host_blocks,
        config.prefix_caching,
        config.chunked_prefill,
        config.seed,
        config.max_waiting,
    )
