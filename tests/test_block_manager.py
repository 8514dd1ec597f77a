"""The block pool against a plain model of it, over random histories."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.core.engine.block_manager import BlockManager, block_hashes

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Holders keep lists of blocks; the model counts references and remembers what was published."""

    def __init__(self):
        super().__init__()
        self.pool = BlockManager(NUM_BLOCKS)
        self.holders: list[list[int]] = []
        self.contents: dict[bytes, int] = {}

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count):
        free = self.pool.num_free
        taken = self.pool.allocate(count)
        if count > free:
            assert taken is None
            assert self.pool.num_free == free
            return
        assert len(set(taken)) == count
        assert 0 not in taken
        held = {b for blocks in self.holders for b in blocks}
        assert not held & set(taken)
        for content, block in list(self.contents.items()):
            if block in taken:
                del self.contents[content]
        self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        blocks = data.draw(st.sampled_from(self.holders))
        self.pool.acquire(blocks)
        self.holders.append(list(blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), content=st.binary(min_size=1, max_size=1))
    def publish(self, data, content):
        block = data.draw(st.sampled_from([b for blocks in self.holders for b in blocks]))
        self.pool.publish(block, content)
        if content not in self.contents and block not in self.contents.values():
            self.contents[content] = block

    @rule(content=st.binary(min_size=1, max_size=1))
    def find(self, content):
        found = self.pool.lookup([content])
        assert found == ([self.contents[content]] if content in self.contents else [])
        if found:
            self.pool.acquire(found)
            self.holders.append(found)

    @rule()
    def forget(self):
        self.pool.forget_all()
        self.contents.clear()

    @invariant()
    def counts_agree(self):
        refs = [0] * NUM_BLOCKS
        for blocks in self.holders:
            for block in blocks:
                refs[block] += 1
        assert [self.pool.refs(b) for b in range(NUM_BLOCKS)] == refs
        assert self.pool.num_held == sum(r > 0 for r in refs)
        assert self.pool.num_free == NUM_BLOCKS - 1 - self.pool.num_held

    def teardown(self):
        for blocks in self.holders:
            self.pool.release(blocks)
        assert self.pool.num_free == self.pool.num_usable


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_double_free_is_an_error():
    pool = BlockManager(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="nobody holds"):
        pool.release(blocks)


def test_least_recently_used_contents_go_first_and_a_chain_goes_from_its_end():
    pool = BlockManager(6)
    first, second = pool.allocate(2), pool.allocate(2)
    chains = [block_hashes([n] * 8, 4) for n in (1, 2)]
    for blocks, chain in zip((first, second), chains, strict=True):
        for block, content in zip(blocks, chain, strict=True):
            pool.publish(block, content)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(1) not in (first, second)  # the never used block before any cached one
    pool.allocate(1)
    assert pool.lookup(chains[0]) == first[:1]
    pool.allocate(1)
    assert pool.lookup(chains[0]) == []
    assert pool.lookup(chains[1]) == second


def test_hashes_name_the_whole_prefix_and_the_salt():
    a = block_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    assert len(a) == 2
    assert block_hashes([5, 6, 7, 8], 4) != a[1:]
    assert block_hashes([5, 6, 7, 8], 4, parent=a[0]) == a[1:]
    assert block_hashes([1, 2, 3, 4], 4, salt="x") != a[:1]
    assert len(set(block_hashes([0] * 400, 4))) == 100
