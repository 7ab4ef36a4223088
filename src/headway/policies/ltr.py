"""Learning to rank: shortest job first with answers' lengths from the ranker that learns from what was answered.

The ranker scores a request before it is queued and never inside a step; where it has nothing to say yet, or has been
found wrong, its averages by route and tenant stand in, and this is `sjf`.
"""

from typing import ClassVar

from headway.policies.sjf import ShortestJobFirst


class LearnedRank(ShortestJobFirst):
    """Least cost first, by learned lengths."""

    learns: ClassVar[bool] = True


PLUGIN = LearnedRank
