"""A policy around another policy: the one place that says which hooks go on to the policy within."""

from __future__ import annotations

from headway.core.policy import Policy


class Delegate(Policy):
    """Every public name of `Policy` that no subclass of `Delegate` defines is that of `base`, also a hook added later.

    A subclass that neither delegates a hook nor has a rule for it takes the default: `preempts = Policy.preempts`.
    """

    def __init__(self, base: Policy) -> None:
        super().__init__()
        self.base = base
        kinds = type(self).__mro__
        self._own = {name for kind in kinds[: kinds.index(Delegate) + 1] for name in vars(kind)}
        for name in dir(Policy):
            if not name.startswith("_") and name not in self._own:
                setattr(self, name, getattr(base, name))

    def overrides(self, hook: str) -> bool:
        return super().overrides(hook) if hook in self._own else self.base.overrides(hook)
