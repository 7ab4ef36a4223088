"""The pool of KV blocks: each is clean, idle with cached content, or in use; drawn in docs/architecture.md.

It counts references and knows no request, no key and no tensor. A block moves in O(1), except by `take_settled`.

Plans run in order, so a block that was released may be taken for a later plan at once. A writer outside the plans needs
a settled block: one whose last naming plan has been collected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain, islice


class BlockPool:
    """Every block is in exactly one of clean, cached-idle, in use; the three sum to the capacity; refs >= 0."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks  # readers of each block; others only read it
        self._clean = list(range(num_blocks - 1, -1, -1))  # popped from the end: low ids first
        # OrderedDict, not dict: popping the front of a dict is O(n) once many fronts were popped.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict
        self.given_up: dict[int, None] | None = None  # where kept: blocks whose content was lost since it was emptied
        self.newest = self.collected = -1  # plans: handed out, and collected, last
        self._named = [-1] * num_blocks  # the last plan that may name a block; of one in use, as far as known

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._clean) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def num_idle_of(self, blocks: Sequence[int]) -> int:
        """How many of these are idle."""
        return sum(map(self._idle.__contains__, blocks))

    def take(self, count: int) -> list[int] | None:
        """Hand out `count` blocks with one reference each, all or none: clean ones, then the oldest idle, evicted."""
        clean, refs, num_clean = self._clean, self.refs, min(count, len(self._clean))
        if count > num_clean + len(self._idle):
            return None
        if count == 1:  # nearly always: a decode row enters its next block
            taken = [clean.pop() if clean else self._evict()]
        else:
            taken = clean[: -num_clean - 1 : -1]
            del clean[len(clean) - num_clean :]
            taken += [self._evict() for _ in range(count - num_clean)]
        for block in taken:
            refs[block] = 1
        return taken

    def take_settled(self, count: int) -> list[int] | None:
        """Likewise, for a writer outside the plans; O(free blocks)."""
        settled = (b for b in chain(self._clean, self._idle) if self._named[b] <= self.collected)
        taken = list(islice(settled, count))
        if len(taken) < count:
            return None
        for block in taken:
            self.refs[block] = 1
            if self.given_up is not None:
                self.given_up.pop(block, None)  # its new content may be there before the next plan
            if block in self._idle:
                del self._idle[block]
                self._on_evict(block)
        self._clean = [block for block in self._clean if not self.refs[block]]
        return taken

    def name(self, block: int) -> None:
        """The next plan will name this block, whichever request owns it by then."""
        self._named[block] = self.newest + 1

    def _evict(self) -> int:
        block = self._idle.popitem(last=False)[0]
        self._on_evict(block)
        if self.given_up is not None:
            self.given_up[block] = None
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """One more reader of each; wakes idle blocks."""
        refs = self.refs
        for block in blocks:
            readers = refs[block]
            if not readers:
                del self._idle[block]
            refs[block] = readers + 1

    def release(self, blocks: Iterable[int], kept: Container[int] = ()) -> None:
        """One reader less of each. The last one leaves a block idle if it is among the `kept`, else clean."""
        refs, named, newest, given_up = self.refs, self._named, self.newest, self.given_up
        for block in blocks:
            refs[block] = left = refs[block] - 1
            if left > 0:
                continue
            assert not left, f"block {block} released more often than taken"
            if named[block] < newest:
                named[block] = newest
            if block in kept:
                self._idle[block] = None
            else:
                self._clean.append(block)
                if given_up is not None:
                    given_up[block] = None
