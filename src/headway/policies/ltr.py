"""Learning to rank: shortest job first with answers' lengths from the ranker that learns from what was answered.

The ranker scores a request before it is queued and never inside a step. Until it has learned enough, and while it is
worse than averages by route and tenant, those averages are used, as in `sjf`.
"""

from typing import ClassVar

from headway.policies.sjf import ShortestJobFirst


class LearnedRank(ShortestJobFirst):
    """Least cost first, by learned lengths."""

    learns: ClassVar[bool] = True


PLUGIN = LearnedRank
