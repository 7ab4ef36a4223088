"""Tenants and lanes wrap a policy: what they do not decide themselves, the inner policy decides."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

import pytest

from headway.core.policy import Policy
from headway.core.request import Request
from headway.policies._shared import Laned, Shared
from headway.policies.slo import SloAware
from headway.values.params import SamplingParams

WRAPPERS: dict[str, Callable[[Policy], Policy]] = {
    "tenants": Shared,
    "lanes": lambda base: Laned(base, lanes={"fast": 3.0, "slow": 1.0}),
}
# What shares are about. A hook belongs here only if the policy within must not decide it, or not alone.
_SHARES = {
    *("attach", "queue", "rank", "preempts", "priority_victim_key"),
    *("on_admit", "on_tokens", "overrides", "has_shares"),
}
OWN = {"tenants": _SHARES, "lanes": _SHARES | {"resumes_first"}}
PUBLIC = [name for name in dir(Policy) if not name.startswith("_")]


class Marked(Policy):
    """Every hook returns its own name, every attribute is a mark."""


for _name in PUBLIC:
    if callable(getattr(Policy, _name)) and _name not in ("attach", "queue", "overrides"):
        setattr(Marked, _name, lambda self, *args, name=_name: name)
    elif _name not in ("is_global_order", "tools") and not callable(getattr(Policy, _name)):
        setattr(Marked, _name, f"mark of {_name}")


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("name", PUBLIC)
def test_whatever_shares_do_not_decide_is_decided_within(kind: str, name: str) -> None:
    base = Marked()
    policy = WRAPPERS[kind](base)
    if name in OWN[kind]:
        assert any(name in vars(each) for each in type(policy).__mro__ if each is not Policy)
    elif callable(getattr(Policy, name)):
        num_args = len(signature(getattr(Policy, name)).parameters) - 1
        assert getattr(policy, name)(*[None] * num_args) == name
        assert policy.overrides(name)
    else:
        assert getattr(policy, name) == getattr(base, name)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_hook_that_is_new_reaches_the_policy_within(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Knows(Policy):
        def on_eclipse(self, req: Request) -> str:
            return f"seen by {req.id}"

    monkeypatch.setattr(Policy, "on_eclipse", lambda self, req: "not overridden", raising=False)
    req = Request(7, [1], SamplingParams())
    looking, blind = WRAPPERS[kind](Knows()), WRAPPERS[kind](Policy())
    assert looking.on_eclipse(req) == "seen by 7"  # type: ignore[attr-defined]
    assert looking.overrides("on_eclipse")
    assert blind.on_eclipse(req) == "not overridden"  # type: ignore[attr-defined]
    assert not blind.overrides("on_eclipse")


def test_no_request_of_a_tenant_takes_a_slot_from_another_tenant() -> None:
    assert SloAware().overrides("preempts")
    assert not Shared(SloAware()).overrides("preempts"), "classes within a tenant are no claim on others' slots"
    assert Laned(SloAware(), lanes={"fast": 1.0}).overrides("preempts")
