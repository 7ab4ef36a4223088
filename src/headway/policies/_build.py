"""A configuration becomes a policy, and the gate of a batching baseline. Knows no engine, no model and no torch."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature

from headway import plugins
from headway.config import SchedulerConfig
from headway.config_text import parse_batching, parse_options, parse_shares
from headway.control.gates import BatchGate, NearLengths
from headway.core.policy import Policy
from headway.errors import ConfigError
from headway.policies._options import checked
from headway.policies._shared import Laned, Shared

_DEFAULTS = SchedulerConfig()
_RENAMED = {  # hooks of earlier releases: ignoring one would change a policy without a word
    "gap": "itl_target",
    "rests": "to_pause",
    "doomed": "is_infeasible",
    "displaces": "preempts",
    "displaced_key": "priority_victim_key",
    "tries": "backfill_depth",
    "is_whole": "is_global_order",
}
_NAMED = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def build_policy(wanted: SchedulerConfig) -> Policy:
    """The policy that is asked for, within tenants and lanes if they are."""
    if parse_batching(wanted.batching).has_buckets:
        names = ("policy", "policy_options", "fair", "tenant_weights", "lanes")
        given = [name for name in names if getattr(wanted, name) != getattr(_DEFAULTS, name)]
        if given:
            what = f"batching is {wanted.batching!r}, and buckets are an order of their own"
            raise ConfigError(f"{what}; leave out {' and '.join(given)}, or buckets")
        return NearLengths()
    plugin = plugins.load("policies", wanted.policy)
    if not (isinstance(plugin, type) and issubclass(plugin, Policy)):
        raise _no_policy(wanted.policy, plugin)
    options = parse_options(wanted.policy_options, "policy_options")
    known = [name for name, how in signature(plugin).parameters.items() if how.kind in _NAMED]
    for name in options.keys() - set(known):
        allowed = ", ".join(known) or "none"
        raise ConfigError(f"policy_options names {name!r}; allowed for policy {wanted.policy!r}: {allowed}")
    for old, new in _RENAMED.items():
        if hasattr(plugin, old):
            raise ConfigError(f"policy {wanted.policy!r} defines {old!r}, which is called {new!r} now; rename it")
    make: Callable[..., Policy] = plugin
    maker = next(kind for kind in plugin.__mro__ if "__init__" in vars(kind))  # others have bounds of their own
    policy = make(**(checked(options) if maker.__module__.startswith("headway.") else options))
    fair = wanted.fair or isinstance(policy, Shared)  # the policy of that name is the option over arrival
    if isinstance(policy, Shared):
        policy = policy.base
    lanes, weights = parse_shares(wanted.lanes, "lanes"), parse_shares(wanted.tenant_weights, "tenant_weights")
    if weights and not fair:
        raise ConfigError(f"tenant_weights is {wanted.tenant_weights!r}, but tenants have no shares; add fair")
    if not (fair or lanes):
        return policy
    kind = Laned if lanes else Shared
    return kind(policy, name=wanted.policy, fair=fair, weights=weights, lanes=lanes)


def _no_policy(name: str, found: object) -> ConfigError:
    kind = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
    return ConfigError(f"policy {name!r} is {kind}; allowed: a class derived from headway.core.policy.Policy")


def build_gate(wanted: SchedulerConfig) -> BatchGate | None:
    """The batch barrier of a baseline; None for continuous batching."""
    batching = parse_batching(wanted.batching)
    if batching.kind == "continuous":
        return None
    return BatchGate(min(batching.size, wanted.num_slots), batching.window_ms / 1e3)
