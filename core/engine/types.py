"""What goes into the engine and what comes out of it. Plain data: it crosses the process boundary as msgpack."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position.

    Attributes:
        token: the chosen token.
        logprob: its natural log-probability.
        rank: 1 for the likeliest token.
        top_ids: the likeliest tokens, likeliest first.
        top_logprobs: their log-probabilities.
    """

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class EngineRequest(msgspec.Struct, array_like=True):
    """One prompt to complete, n times.

    Attributes:
        request_id: unique among the requests under way.
        prompt_token_ids: the prompt; at least one token.
        params: how to sample.
        priority: lower runs earlier; equal ones in order of arrival.
        cache_salt: requests share cached prefixes only with requests of the same salt.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""


class EngineOutput(msgspec.Struct, array_like=True):
    """What one step did for one completion of a request.

    Attributes:
        request_id: the request.
        index: which of its n completions.
        token_ids: the new tokens; a token that ended the output is among them.
        finish_reason: "stop" (end-of-sequence or a stop token), "length", "abort" or "error"; None goes on.
        stop_token: the stop token id that ended it, None for end-of-sequence and other reasons.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        logprobs: one for each new token, where asked for.
        prompt_logprobs: once, with the first output: one for each prompt token but the first, where asked for.
        error: for "error": what happened.
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


class EngineStats(msgspec.Struct, array_like=True):
    """Counters and gauges of an engine. Counters count from its start.

    Attributes:
        num_running: sequences that have KV blocks on the device.
        num_waiting: sequences that wait for admission (preempted ones included).
        num_swapped: of those, the ones whose blocks are on the host.
        kv_blocks: usable KV blocks.
        kv_blocks_used: blocks that running sequences hold.
        prefix_queries: prompt tokens looked up in the prefix cache.
        prefix_hits: of those, tokens found.
        preemptions: sequences that had to give up their blocks.
        prompt_tokens: prompt tokens of admitted requests.
        computed_tokens: tokens run through the model (cached prefixes excluded, recomputation included).
        generated_tokens: output tokens.
        steps: steps run.
        late_compiles: programs that the backend made after it was ready; each stalled all requests.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    late_compiles: int = 0


class EngineInfo(msgspec.Struct):
    """What an engine is, fixed once it is ready.

    Attributes:
        model: the model's name.
        family: the family that declared it.
        device: the device's id.
        dtype, kv_dtype: in force.
        vocab_size: tokens are 0 to vocab_size - 1.
        eos_token_ids: tokens that end a sequence.
        max_model_len: tokens per sequence, prompt and output.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens per step.
        block_size: tokens per KV block.
        kv_blocks: usable KV blocks.
        kv_block_bytes: bytes of one block over all layers.
        weight_bytes: bytes of the parameters.
        sampling: SamplingParams fields that the device honours.
        choices: what was left on auto and what was chosen, a sentence each.
    """

    model: str
    family: str
    device: str
    dtype: str
    kv_dtype: str
    vocab_size: int
    eos_token_ids: list[int]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_blocks: int
    kv_block_bytes: int
    weight_bytes: int
    sampling: list[str]
    choices: list[str]
