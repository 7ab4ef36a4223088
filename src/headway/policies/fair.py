"""Fair among tenants: whoever has been given least is next, first come, first served within a tenant.

The same shares stand over any policy that allows it: see the `fair` and `lanes` options.
"""

from collections.abc import Mapping

from headway.core.policy import Policy
from headway.policies._shared import Shared


class Fair(Shared):
    """`weights` says who gets more than one share."""

    def __init__(self, weights: Mapping[str, float] | None = None, /) -> None:
        super().__init__(Policy(), weights=weights)


PLUGIN = Fair
