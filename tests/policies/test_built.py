"""Options of policies and of shares, and the errors where they make no sense."""

from __future__ import annotations

import math
import subprocess
import sys
from inspect import signature

import pytest

from headway import plugins
from headway.config import SchedulerConfig
from headway.core.policy import Policy
from headway.errors import ConfigError
from headway.policies._build import build_policy
from headway.policies._shared import Shared
from headway.policies.sjf import ShortestJobFirst


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "sjf", "policy_options": "bta=2"}, r"names 'bta'; allowed for policy 'sjf': aging, share_every"),
        ({"policy": "fair", "policy_options": "weights=2"}, r"allowed for policy 'fair': none"),
        ({"tenant_weights": "ann=2"}, r"tenants have no shares; add fair"),
        ({"policy": "srpt", "fair": True}, r"'srpt' orders all waiting"),
    ],
)
def test_options_that_make_no_sense_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_policy(SchedulerConfig(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"policy": "fair"}, {"policy": "fcfs", "fair": True}])
def test_fair_by_name_is_fair_by_option(fields: dict[str, object]) -> None:
    policy = build_policy(SchedulerConfig(tenant_weights="ann=2", lanes="fast=8,slow=2", **fields))  # type: ignore[arg-type]
    assert isinstance(policy, Shared)
    assert not isinstance(policy.base, Shared)
    assert policy.is_fair
    assert policy._weights == {"ann": 2.0}
    assert policy.lanes == {"fast": 8.0, "slow": 2.0}


def test_options_reach_the_policy() -> None:
    policy = build_policy(SchedulerConfig(policy="sjf", policy_options="aging=0.5,share_every=7"))
    assert isinstance(policy, ShortestJobFirst)
    assert (policy.aging, policy.share_every) == (0.5, 7)


def test_a_policy_is_built_where_torch_cannot_be_imported() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None  # any import of them fails
from headway.config import SchedulerConfig
from headway.core.policy import Policy
from headway.policies._build import build_gate, build_policy
print(type(build_policy(SchedulerConfig(policy="sjf", fair=True, lanes="fast=8,slow=2"))).__name__)
print(build_gate(SchedulerConfig(batching="static:4")).size)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["Laned", "4"], "")


IMPOSSIBLE = {
    "aging": "-1",
    "beta": "abc",
    "boost_after": "0",
    "least_itl": "-0.1",
    "patience": "0",
    "promote_after": "soon",
    "quantum": "0",
    "share_every": "2.5",
    "spare": "1.5",
}
OPTIONS = [
    (policy, name)
    for policy in plugins.names("policies")
    for name, how in signature(plugins.load("policies", policy)).parameters.items()
    if how.kind is how.KEYWORD_ONLY
]


@pytest.mark.parametrize("value", ["", "nan", "-inf", "-1e-9", "null?", "1" + 400 * "0"])
@pytest.mark.parametrize(("policy", "name"), OPTIONS)
def test_no_option_of_any_policy_takes_what_is_no_value(policy: str, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^policy_options {name} is .*; allowed: a "):
        build_policy(SchedulerConfig(policy=policy, policy_options=f"{name}={value}"))


@pytest.mark.parametrize(("policy", "name"), OPTIONS)
def test_an_impossible_value_is_refused_with_what_is_allowed(policy: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^policy_options {name} is .*; allowed: a .*(number|share)"):
        build_policy(SchedulerConfig(policy=policy, policy_options=f"{name}={IMPOSSIBLE[name]}"))


@pytest.mark.parametrize("value", ["null", "inf"])
@pytest.mark.parametrize(("policy", "name"), [("sjf", "boost_after"), ("mlfq", "promote_after")])
def test_never_is_null_or_infinite(policy: str, name: str, value: str) -> None:
    built = build_policy(SchedulerConfig(policy=policy, policy_options=f"{name}={value}"))
    assert getattr(built, name) == math.inf


class Moody(Policy):
    def __init__(self, *, beta: str = "x", spare: object = 0) -> None:
        super().__init__()
        self.given = beta, spare


def test_a_policy_of_others_has_bounds_of_its_own() -> None:
    policy = build_policy(SchedulerConfig(policy=f"{__name__}:Moody", policy_options="beta=fast,spare=-7"))
    assert isinstance(policy, Moody)
    assert policy.given == ("fast", -7)


class Sooner(ShortestJobFirst):
    pass


def test_a_constructor_of_ours_checks_in_policies_of_others_too() -> None:
    with pytest.raises(ConfigError, match="policy_options aging is 'x'; allowed: a number of at least 0"):
        build_policy(SchedulerConfig(policy=f"{__name__}:Sooner", policy_options="aging=x"))


class OldHooks(Policy):
    is_whole = True


def test_a_hook_by_its_former_name_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match="defines 'is_whole', which is called 'is_global_order' now"):
        build_policy(SchedulerConfig(policy=f"{__name__}:OldHooks"))


@pytest.mark.parametrize(
    ("name", "what"),
    [("fractions:Fraction", "the class Fraction"), ("os:sep", "a str"), ("os:system", "a builtin_function_or_method")],
)
def test_what_is_no_policy_is_refused(name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy '{name}' is {what}; allowed: a class derived from headway.core"):
        build_policy(SchedulerConfig(policy=name))
