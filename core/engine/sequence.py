"""One completion under way: its tokens, its blocks and where it stands."""

from __future__ import annotations

from enum import Enum

from ..sampling.adjust import Adjustments
from .types import EngineRequest, TokenLogprobs


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """Queued for admission; its blocks, if any, are on the host."""
    HELD_BACK = "held back"
    """Not queued yet: it will share the prompt's blocks with the first completion of its request."""
    RUNNING = "running"
    """Has a slot and blocks on the device."""
    FINISHED = "finished"


class Sequence:
    """One completion of a request.

    Attributes:
        request: the request; its params hold for the sequence.
        index: which of the request's completions.
        order: sort key of the queue: (priority, arrival).
        tokens: prompt and output tokens known on the host.
        num_prompt: tokens of the prompt.
        limit: most tokens, prompt and output.
        seed: of its random draws, 64 bits.
        adjustments: penalties, biases and bans, or None where it has none.
        status: where it stands.
        slot: its row in the table of running sequences; -1 while it has none.
        blocks: its KV blocks in order; 0 where a sliding window has left one.
        num_freed: leading blocks that a sliding window has left.
        hashes: content hashes of its full blocks, as far as they were computed.
        num_published: leading blocks whose contents were offered to the prefix cache.
        computed: tokens whose KV was computed; only kept up to date while it does not run (see RunningTable).
        host_blocks: where its blocks are while it is swapped out.
        num_cached: prompt tokens found in the prefix cache.
        leader: the completion whose blocks it will share.
        followers: completions held back until its prompt is computed.
        prompt_logprobs: those gathered so far, where asked for.
    """

    __slots__ = (
        "adjustments",
        "blocks",
        "computed",
        "followers",
        "hashes",
        "host_blocks",
        "index",
        "leader",
        "limit",
        "num_cached",
        "num_freed",
        "num_prompt",
        "num_published",
        "order",
        "prompt_logprobs",
        "request",
        "seed",
        "slot",
        "status",
        "tokens",
    )

    def __init__(
        self,
        request: EngineRequest,
        index: int,
        arrival: int,
        limit: int,
        seed: int,
        adjustments: Adjustments | None,
    ) -> None:
        self.request = request
        self.index = index
        self.order = (request.priority, arrival)
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.limit = limit
        self.seed = seed
        self.adjustments = adjustments
        self.status = Status.WAITING
        self.slot = -1
        self.blocks: list[int] = []
        self.num_freed = 0
        self.hashes: list[bytes] = []
        self.num_published = 0
        self.computed = 0
        self.host_blocks: list[int] = []
        self.num_cached = 0
        self.leader: Sequence | None = None
        self.followers: list[Sequence] = []
        wants_prompt = index == 0 and request.params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if wants_prompt else None

    @property
    def num_output(self) -> int:
        """Output tokens known on the host."""
        return len(self.tokens) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of prompt positions are still wanted."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order
