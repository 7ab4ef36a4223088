"""First come, first served: the defaults of `Policy`, and the order every other policy is compared with."""

from headway.core.policy import Policy


class FirstComeFirstServed(Policy):
    """Admits by arrival; no request starves in this order."""


PLUGIN = FirstComeFirstServed
