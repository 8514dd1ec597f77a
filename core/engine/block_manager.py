"""The pool of KV blocks: reference counts, a prefix cache by chained content hash, and an LRU of free blocks.

Block 0 is the null block: padded tokens are written there and nothing reads it; it is never handed out.

A block is *held* while its reference count is above zero. A free block that was published under a content
hash keeps its contents: it can be found again (`lookup`) until it is the least recently used free block and a
new block is needed. Every operation is O(1) per block.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

NULL_BLOCK = 0


def block_hashes(token_ids: Sequence[int], block_size: int, parent: bytes = b"", salt: str = "") -> list[bytes]:
    """Content hashes of the full blocks of a token sequence.

    Each is a 128-bit BLAKE2b of the hash before it and the block's tokens, so it names the whole prefix.

    Args:
        token_ids: the tokens, from a block boundary on; a last, partial block is left out.
        block_size: tokens per block.
        parent: the hash of the block before them; empty at the beginning of a sequence.
        salt: sequences with different salts never share blocks; used at the beginning only.
    """
    count = len(token_ids) // block_size
    raw = np.asarray(token_ids[: count * block_size], np.int32).tobytes()
    width = 4 * block_size
    chain = parent or hashlib.blake2b(salt.encode(), digest_size=16).digest()
    hashes = []
    for at in range(0, count * width, width):
        chain = hashlib.blake2b(chain + raw[at : at + width], digest_size=16).digest()
        hashes.append(chain)
    return hashes


class BlockManager:
    """Hands out KV blocks.

    Args:
        num_blocks: blocks in the pool, the null block included.
        prefix_caching: whether published blocks can be found again.
    """

    def __init__(self, num_blocks: int, prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError("a pool needs the null block and at least one more")
        self.num_blocks = num_blocks
        self.prefix_caching = prefix_caching
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        # Free blocks, the next to be taken first: blocks without published contents, then the others by last use.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out in all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.num_usable - len(self._free)

    def refs(self, block: int) -> int:
        """How many hold the block."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` free blocks, each with one reference; None, and nothing taken, when there are not so many."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix of the hash chain that is in the cache. Takes no reference."""
        if not self.prefix_caching:
            return []
        found = []
        for content in hashes:
            block = self._cached.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_without(self, blocks: Iterable[int]) -> int:
        """How many blocks could be handed out if these were acquired first."""
        return len(self._free) - sum(1 for b in blocks if self._refs[b] == 0)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Takes one more reference to each block (null blocks are passed over)."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one reference to each block of a sequence (null blocks are passed over).

        The last blocks are freed first, so a chain is evicted from its end and its beginning stays findable.

        Raises:
            RuntimeError: a block is not held: the caller's bookkeeping is wrong.
        """
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            if self._refs[block] <= 0:
                raise RuntimeError(f"block {block} was released but nobody holds it")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, content: bytes) -> None:
        """Makes a held block findable under its content hash; of equal contents the first one stays findable."""
        if self.prefix_caching and content not in self._cached and self._hash_of[block] is None:
            self._cached[content] = block
            self._hash_of[block] = content

    def forget_all(self) -> None:
        """Empties the prefix cache: after a failed step nobody knows what the published blocks hold."""
        self._cached.clear()
        self._hash_of = [None] * self.num_blocks

    def _forget(self, block: int) -> None:
        content = self._hash_of[block]
        if content is not None:
            self._hash_of[block] = None
            del self._cached[content]
