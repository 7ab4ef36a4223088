"""Fair among tenants: the tenant that got the least service is next; within a tenant, first come, first served.

The options `fair` and `lanes` put the same shares over any policy that has no global order.
"""

from collections.abc import Mapping

from headway.core.policy import Policy
from headway.policies._shared import Shared


class Fair(Shared):
    """`weights` gives the shares of tenants; a tenant that is not named has 1."""

    def __init__(self, weights: Mapping[str, float] | None = None, /) -> None:
        super().__init__(Policy(), weights=weights)


PLUGIN = Fair
