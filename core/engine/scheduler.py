"""The scheduler: which tokens run in the next step.

Decodes first, then prompts in chunks, under one token budget; a prompt's blocks are found in the prefix cache
where possible. When blocks run out, the sequence that is last in order gives up its own: they go to the host,
or are computed again later. What a device demands (separate prefill and decode steps, largest sizes) comes in
as `StepConstraints`; nothing here knows a device.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection

import numpy as np

from ..backend import StepConstraints, StepLimits
from .batch import Batch, Chunk, Transfer
from .block_manager import BlockManager, block_hashes
from .sequence import Sequence, Status
from .table import RunningTable
from .types import EngineStats


class _MustCollectError(Exception):
    """Blocks are short while steps are in flight: collect them first, they may free some."""


class Scheduler:
    """Owns the queue, the table of running sequences and the blocks.

    Args:
        limits: bounds of the engine.
        constraints: what the backend takes.
        blocks: the pool of KV blocks.
        num_host_blocks: blocks on the host for swapping; 0 preempts by recompute.
        eos_token_ids: tokens that end a sequence.
        chunked_prefill: whether a prompt may be split over steps.
        window: tokens beyond which no layer looks back, or None.
    """

    def __init__(
        self,
        limits: StepLimits,
        constraints: StepConstraints,
        blocks: BlockManager,
        num_host_blocks: int = 0,
        eos_token_ids: Collection[int] = (),
        chunked_prefill: bool = True,
        window: int | None = None,
    ) -> None:
        self.limits = limits
        self.constraints = constraints
        self.blocks = blocks
        self.table = RunningTable(limits)
        self.stats = EngineStats(kv_blocks=blocks.num_usable)
        self._eos = tuple(eos_token_ids)
        self._chunked = chunked_prefill
        self._window = window
        self._host_free = list(range(num_host_blocks))
        self._waiting: list[Sequence] = []  # a heap; finished sequences stay until they come up
        self._stale = 0  # finished ones among them
        self._held_back = 0
        self._running: list[Sequence] = []  # sorted
        self._order = np.zeros(0, np.int64)  # their slots, sorted alike; remade when _dirty
        self._dirty = False
        self._prefilling: list[Sequence] = []  # running, prompt not yet computed; sorted
        self._transfers: list[Transfer] = []
        # Prompts that end in this step. Their followers come in later ones: block copies run before a step, and
        # would miss what it writes.
        self._leaders: list[Sequence] = []
        self._turn = 0
        self._prefill_last = False
        prefill, decode = constraints.prefill, constraints.decode
        self._max_tokens = min(limits.max_num_batched_tokens, max(prefill.tokens or (2**31,)))
        self._max_prefill_seqs = max(prefill.sequences or (2**31,))
        self._max_decodes = max(decode.sequences or (2**31,))

    # ------------------------------------------------------------------------------------------- queue

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for admission."""
        return len(self._waiting) - self._stale + self._held_back

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._running) or self.num_waiting > 0

    def add(self, seq: Sequence, followers: list[Sequence]) -> None:
        """Queues a sequence; its followers are held back until its prompt is computed, to share it."""
        for follower in followers:
            follower.leader = seq
            follower.status = Status.HELD_BACK
        seq.followers = followers
        self._held_back += len(followers)
        heapq.heappush(self._waiting, seq)

    def finish(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it stands, and frees all that it holds."""
        if seq.status is Status.RUNNING:
            self._stop_running(seq)
        elif seq.status is Status.WAITING:
            self._stale += 1
            self._drop_host_blocks(seq)
        elif seq.status is Status.HELD_BACK:
            self._held_back -= 1
        else:
            return
        seq.status = Status.FINISHED
        self._release_followers(seq)
        if self._stale > 64 and self._stale > len(self._waiting) // 2:
            self._waiting = [s for s in self._waiting if s.status is Status.WAITING]
            heapq.heapify(self._waiting)
            self._stale = 0

    def snapshot(self) -> EngineStats:
        """The counters, with the gauges as they are now."""
        self.stats.num_running = len(self._running)
        self.stats.num_waiting = self.num_waiting
        self.stats.kv_blocks_used = self.blocks.num_held
        return self.stats

    # ---------------------------------------------------------------------------------------- schedule

    def schedule(self, in_flight: int) -> Batch | None:
        """Picks the next step's work and takes the blocks for it; None when there is nothing to run now.

        Args:
            in_flight: steps submitted and not yet collected. While there are any, nothing is preempted.
        """
        try:
            batch = self._pick(in_flight)
        except _MustCollectError:
            return None
        if batch is None:
            return None
        for leader in self._leaders:
            self._release_followers(leader)
        self._leaders.clear()
        batch.transfers, self._transfers = self._transfers, []
        self._prefill_last = bool(batch.chunks)
        self.stats.steps += 1
        self.stats.computed_tokens += batch.num_tokens
        return batch

    def _pick(self, in_flight: int) -> Batch | None:
        batch = Batch()
        while True:
            mixed = self.constraints.mixed
            prefill_first = not mixed and not self._prefill_last
            if prefill_first:
                self._add_chunks(batch)
            if mixed or not batch.chunks:
                self._add_decodes(batch, in_flight)
            if (mixed or not batch.num_decodes) and not prefill_first:
                self._add_chunks(batch)
            if batch.num_tokens:
                return batch
            if not self._prefilling or in_flight:
                return None
            # Every prompt under way waits for blocks, and no decode will free any: the last one steps back.
            self._preempt(self._running[-1])

    def _add_decodes(self, batch: Batch, in_flight: int) -> None:
        t, size = self.table, self.limits.block_size
        slots = self._slots()
        length = t.length[slots]
        ready = (length - t.computed[slots] == 1) & (length < t.limit[slots])
        ready &= ~(t.history[slots] & (t.pending[slots] > 0))
        slots = slots[ready]
        room = min(self._max_tokens, self._max_decodes)
        if len(slots) > room:  # all get their turn
            self._turn = (self._turn + room) % len(slots)
            slots = np.sort(np.roll(slots, -self._turn)[:room])
        if not len(slots):
            return
        need = (t.num_blocks[slots] * size <= t.computed[slots]) | t.check_copy[slots]
        if need.any():
            for slot in slots[need].tolist():
                seq = t.sequences[slot]
                if seq is not None:  # else it was preempted for one before it
                    self._secure(seq, in_flight)
            slots = np.asarray([s for s in slots.tolist() if t.sequences[s] is not None], np.int64)
        batch.set_decodes(t, slots)
        t.computed[slots] += 1
        t.length[slots] += 1
        t.pending[slots] += 1
        for seq in [s for s in self._prefilling if t.length[s.slot] - t.computed[s.slot] <= 1]:
            if t.pending[seq.slot]:  # a prompt whose last token ran as a decode
                self._prompt_done(seq)

    def _secure(self, seq: Sequence, in_flight: int) -> None:
        """Makes sure that the next token of a decoding sequence has a block of its own, by preemption if need be."""
        slot = seq.slot
        self._leave_window(seq)
        while seq.slot == slot and not (self._grow(seq, 1) and self._unshare_tail(seq)):
            if in_flight:
                raise _MustCollectError
            self._preempt(self._running[-1])

    def _add_chunks(self, batch: Batch) -> None:
        budget = self._max_tokens - batch.num_tokens
        rows = self._max_prefill_seqs - batch.num_decodes
        for seq in list(self._prefilling):
            if budget <= 0 or rows <= 0:
                return
            count, used = self._add_chunk(batch, seq, budget, rows)
            budget, rows = budget - count, rows - used
        while self._waiting and budget > 0 and rows > 0 and self.table.num_free:
            seq = self._waiting[0]
            if seq.status is not Status.WAITING:
                heapq.heappop(self._waiting)
                self._stale -= 1
                continue
            if not self._admit(seq, budget, batch):
                return
            heapq.heappop(self._waiting)
            count, used = self._add_chunk(batch, seq, budget, rows)
            budget, rows = budget - count, rows - used

    def _add_chunk(self, batch: Batch, seq: Sequence, budget: int, rows: int) -> tuple[int, int]:
        """Adds a piece of a prompt; returns the tokens and the logits rows that it takes, (0, 0) for none."""
        t, size, slot = self.table, self.limits.block_size, seq.slot
        start = int(t.computed[slot])
        gap = int(t.length[slot]) - start
        count = min(gap, budget)
        if seq.wants_prompt_logprobs:
            count = min(count, rows)
        if not self._chunked and count < gap:
            return 0, 0
        self._leave_window(seq)
        if not self._grow(seq, count) and self._chunked:
            self._grow(seq, len(seq.blocks) * size - start + self.blocks.num_free * size)
        count = min(count, len(seq.blocks) * size - start)
        if count <= 0 or not self._unshare_tail(seq):
            return 0, 0
        done = start + count
        samples = done == t.length[slot]
        batch.chunks.append(Chunk(seq, slot, start, count, samples, seq.wants_prompt_logprobs))
        batch.num_tokens += count
        t.computed[slot] = done
        self.publish(seq, done)
        if samples:
            t.length[slot] += 1
            t.pending[slot] += 1
            self._prompt_done(seq)
        return count, count if seq.wants_prompt_logprobs else 1

    # --------------------------------------------------------------------------------------- admission

    def _admit(self, seq: Sequence, budget: int, batch: Batch) -> bool:
        """Gives a waiting sequence a slot and the blocks that it can share; False when there is no room yet."""
        if not self._chunked and len(seq.tokens) - seq.computed > budget:
            return False
        spare = self.blocks.num_usable // 100 if self._running else 0
        total = -(-(len(seq.tokens) + 1) // self.limits.block_size)
        if any(chunk.seq is seq.leader for chunk in batch.chunks):
            seq.leader = None  # it came back from preemption in this very step: nothing to copy from yet
        if seq.host_blocks:
            computed = self._swap_in(seq, total + spare)
        else:
            computed = self._share(seq, total + spare)
        if computed < 0:
            return False
        seq.status = Status.RUNNING
        slot = self.table.add(seq, computed, self._eos)
        self.table.check_copy[slot] = seq.leader is not None
        seq.leader = None
        insort(self._running, seq)
        insort(self._prefilling, seq)
        self._dirty = True
        return True

    def _share(self, seq: Sequence, blocks_wanted: int) -> int:
        """Takes the blocks that the sequence can share; returns the tokens computed in them, or -1: no room."""
        size = self.limits.block_size
        known = len(seq.tokens)
        leader = seq.leader if seq.leader is not None and self._can_fork(seq.leader) else None
        if leader is not None:
            shared = leader.blocks[: -(-seq.num_prompt // size)]
            computed = seq.num_prompt - 1
            wanted = blocks_wanted - len(shared) + 1  # one for the copy of the last block
        else:
            seq.leader = None
            shared = []
            if self.blocks.prefix_caching and not seq.wants_prompt_logprobs:
                self._hash(seq, known)
                shared = self.blocks.lookup(seq.hashes[: (known - 1) // size])
            computed = len(shared) * size
            wanted = blocks_wanted - len(shared)
        if self.blocks.num_free_without(shared) < wanted:
            return -1
        self.blocks.acquire(shared)
        seq.blocks = list(shared)
        seq.num_published = 0 if leader else len(shared)
        if leader is not None:
            self.table.check_copy[leader.slot] = True
            seq.num_freed = leader.num_freed
        if seq.num_output == 0:
            seq.num_cached = computed
            self.stats.prompt_tokens += known
        if self.blocks.prefix_caching:
            self.stats.prefix_queries += known
            self.stats.prefix_hits += computed
        return computed

    def _can_fork(self, leader: Sequence) -> bool:
        """Whether it still holds its prompt's blocks, as far back as the prompt's last token looks."""
        if leader.slot < 0 or self.table.computed[leader.slot] < leader.num_prompt:
            return False
        return leader.num_freed <= self._passed(leader.num_prompt - 1)

    def _swap_in(self, seq: Sequence, blocks_wanted: int) -> int:
        kept = [h for h in seq.host_blocks if h >= 0]
        if self.blocks.num_free < max(len(kept), blocks_wanted - seq.num_freed):
            return -1
        taken = self.blocks.allocate(len(kept))
        assert taken is not None
        self._transfers.append(Transfer("in", kept, taken))
        fresh = iter(taken)
        seq.blocks = [next(fresh) if h >= 0 else 0 for h in seq.host_blocks]
        self._host_free += kept
        seq.host_blocks = []
        self.stats.num_swapped -= 1
        return seq.computed

    # ------------------------------------------------------------------------------------------ blocks

    def _grow(self, seq: Sequence, count: int) -> bool:
        """Gives the sequence blocks for `count` more tokens; False, and none given, when there are too few."""
        have = len(seq.blocks)
        need = -(-(int(self.table.computed[seq.slot]) + count) // self.limits.block_size) - have
        if need <= 0:
            return True
        taken = self.blocks.allocate(need)
        if taken is None:
            return False
        seq.blocks += taken
        self.table.block_table[seq.slot, have : have + need] = taken
        self.table.num_blocks[seq.slot] = have + need
        return True

    def _unshare_tail(self, seq: Sequence) -> bool:
        """Copy-on-write: the block that is written next must be held by nobody else. False when blocks are short."""
        t, slot = self.table, seq.slot
        if not t.check_copy[slot]:
            return True
        at = int(t.computed[slot]) // self.limits.block_size
        old = seq.blocks[at]
        if self.blocks.refs(old) > 1:
            taken = self.blocks.allocate(1)
            if taken is None:
                return False
            self._transfers.append(Transfer("copy", [old], taken))
            self.blocks.release([old])
            seq.blocks[at] = t.block_table[slot, at] = taken[0]
        t.check_copy[slot] = False
        return True

    def _leave_window(self, seq: Sequence) -> None:
        """Gives back the blocks that the sliding window has left."""
        passed = self._passed(int(self.table.computed[seq.slot]))
        if passed > seq.num_freed:
            gone = slice(seq.num_freed, passed)
            self.blocks.release(seq.blocks[gone])
            seq.blocks[gone] = [0] * (passed - seq.num_freed)
            self.table.block_table[seq.slot, gone] = 0
            seq.num_freed = passed

    def _passed(self, position: int) -> int:
        """How many leading blocks the window of a token at this position has left."""
        return 0 if self._window is None else max(0, position - self._window + 1) // self.limits.block_size

    def publish(self, seq: Sequence, computed: int) -> None:
        """Offers the full blocks among the first `computed` tokens, whose values are known, to the prefix cache."""
        full = computed // self.limits.block_size
        if not self.blocks.prefix_caching or full <= seq.num_published:
            return
        self._hash(seq, computed)
        for i in range(seq.num_published, full):
            if seq.blocks[i]:
                self.blocks.publish(seq.blocks[i], seq.hashes[i])
        seq.num_published = full

    def _hash(self, seq: Sequence, known: int) -> None:
        size, have = self.limits.block_size, len(seq.hashes)
        if known // size > have:
            parent = seq.hashes[-1] if have else b""
            more = seq.tokens[have * size : known]
            seq.hashes += block_hashes(more, size, parent, seq.request.cache_salt)

    # -------------------------------------------------------------------------------------- preemption

    def _preempt(self, seq: Sequence, may_swap: bool = True) -> None:
        """Takes a running sequence off the device; it waits in its old place in the queue."""
        held = [b for b in seq.blocks if b]
        computed = int(self.table.computed[seq.slot])
        swap = may_swap and computed > 0 and 0 < len(held) <= len(self._host_free)
        if swap:
            kept = [self._host_free.pop() for _ in held]
            fresh = iter(kept)
            self._transfers.append(Transfer("out", held, kept))
            host_blocks = [next(fresh) if b else -1 for b in seq.blocks]
            freed = seq.num_freed
        self._stop_running(seq)
        if swap:
            seq.host_blocks, seq.computed, seq.num_freed = host_blocks, computed, freed
            self.stats.num_swapped += 1
        seq.status = Status.WAITING
        heapq.heappush(self._waiting, seq)
        self._release_followers(seq)
        self.stats.preemptions += 1

    def recompute_all(self) -> None:
        """Takes every sequence off the device and the host; their KV is computed again. No step may be in flight."""
        self.blocks.forget_all()
        self._transfers.clear()
        for seq in [s for s in self._waiting if s.status is Status.WAITING and s.host_blocks]:
            self._drop_host_blocks(seq)
            seq.computed = seq.num_freed = 0
        while self._running:
            self._preempt(self._running[-1], may_swap=False)

    def _drop_host_blocks(self, seq: Sequence) -> None:
        if seq.host_blocks:
            self._host_free += [h for h in seq.host_blocks if h >= 0]
            seq.host_blocks = []
            self.stats.num_swapped -= 1

    def _stop_running(self, seq: Sequence) -> None:
        self.blocks.release(seq.blocks)
        self.table.remove(seq)
        _remove_sorted(self._running, seq)
        _remove_sorted(self._prefilling, seq)
        self._dirty = True
        seq.blocks = []
        seq.computed = seq.num_freed = seq.num_published = 0

    def _prompt_done(self, seq: Sequence) -> None:
        _remove_sorted(self._prefilling, seq)
        if seq.followers:
            self._leaders.append(seq)

    def _release_followers(self, seq: Sequence) -> None:
        for follower in seq.followers:
            if follower.status is Status.HELD_BACK:
                follower.status = Status.WAITING
                self._held_back -= 1
                heapq.heappush(self._waiting, follower)
        seq.followers = []

    def _slots(self) -> np.ndarray:
        if self._dirty:
            self._order = np.fromiter((s.slot for s in self._running), np.int64, len(self._running))
            self._dirty = False
        return self._order


def _remove_sorted(items: list[Sequence], seq: Sequence) -> None:
    at = bisect_left(items, seq)
    if at < len(items) and items[at] is seq:
        del items[at]
