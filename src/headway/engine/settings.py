"""The owner of each setting of a running scheduler: limits and pace, shares, policy options, the waiting limit.

An owner says what is in force (`settings`), refuses what it cannot take (`check`, which changes nothing) and puts other
values into force (`apply`, after a check that passed). `Tuning` makes a change of several owners all or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from headway.config import SchedulerConfig
from headway.config_text import SettingKind, parse_shares
from headway.control.pacer import TargetPacer
from headway.core.policy import Policy
from headway.core.queue import OrderedQueue, RankQueue
from headway.core.scheduler import Scheduler
from headway.engine.client import Settings
from headway.errors import ConfigError
from headway.policies._caps import Capped, ordered, uncapped
from headway.policies._options import LIVE
from headway.policies._shared import Shared
from headway.policies._shares import ShareQueue
from headway.values.limits import Admission, Limits, PrefillOrder, Victims

_WHOLE, _TEXT = SettingKind((int,), "a whole number"), SettingKind((str,), "text")
_WHOLE_OR_NULL = SettingKind((int,), "a whole number or null", takes_null=True)
_NUMBER_OR_NULL = SettingKind((int, float), "a number or null", takes_null=True)


class Owner(Protocol):
    """Part of a running scheduler that has settings."""

    @property
    def kinds(self) -> Mapping[str, SettingKind]:
        """By name of each setting that may change."""

    def settings(self) -> Settings:
        """What is in force, by the names of `kinds`."""

    def check(self, changes: Settings) -> None:
        """ConfigError if these values, each of its kind and other than those in force, cannot be applied."""

    def apply(self, changes: Settings) -> None:
        """Put them into force from the next plan on."""


class LimitSettings:
    """What a step may hold, which requests are admitted and preempted, and the pace. Slots only become fewer."""

    kinds: Mapping[str, SettingKind] = {
        "target_itl_ms": _NUMBER_OR_NULL,
        "max_num_seqs": _WHOLE_OR_NULL,
        "max_num_batched_tokens": _WHOLE_OR_NULL,
        "max_chunk_tokens": _WHOLE_OR_NULL,
        "max_partial_prefills": _WHOLE,
        "prefill_order": _TEXT,
        "kv_admission": _TEXT,
        "victims": _TEXT,
    }

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._most_rows = scheduler.state.limits.rows
        # Slots that followed from other fields stay those there are, whatever becomes of these fields.
        self._config = replace(config, max_num_seqs=self._most_rows)

    def settings(self) -> Settings:
        found: Settings = {name: getattr(self._config, name) for name in self.kinds}
        limits = self._scheduler.state.limits
        found |= {"max_num_batched_tokens": limits.tokens, "max_partial_prefills": limits.partial}
        return {**found, "kv_admission": limits.admission.value}

    def check(self, changes: Settings) -> None:
        config = self._changed(changes)
        if config.num_slots > self._most_rows:
            allowed = f"up to {self._most_rows}, the slots it started with"
            raise ConfigError(f"max_num_seqs is {config.num_slots}; allowed: {allowed}; more need a restart")
        for name, fixed in (("kv_admission", "reserve"), ("max_partial_prefills", "the whole batch")):
            if name in changes and config.batching != "continuous":
                raise ConfigError(f"{name} is always {fixed} with batching {config.batching}; leave it out")

    def apply(self, changes: Settings) -> None:
        config, scheduler = self._changed(changes), self._scheduler
        num_blocks, swaps = scheduler.state.ledger.num_blocks, scheduler.state.limits.swaps
        scheduler.reconfigure(limits_of(config, num_blocks=num_blocks, swaps=swaps))
        if isinstance(scheduler.state.policy, Capped):
            scheduler.state.policy.slots = config.num_slots
        if isinstance(scheduler.state.pacer, TargetPacer):
            scheduler.state.pacer.target = None if config.target_itl_ms is None else config.target_itl_ms / 1e3
        self._config = config

    def _changed(self, changes: Settings) -> SchedulerConfig:
        """The configuration with these values, which says itself what is out of range."""
        if changes.get("max_num_seqs", 0) is None:
            changes = {**changes, "max_num_seqs": self._most_rows}
        return replace(self._config, **changes)  # type: ignore[arg-type]


class ShareSettings:
    """Weights of tenants and lanes, as texts; which lanes there are needs a restart."""

    kinds: Mapping[str, SettingKind] = {"tenant_weights": _TEXT, "lanes": _TEXT}

    def __init__(self, config: SchedulerConfig, policy: Policy) -> None:
        self._texts: Settings = {"tenant_weights": config.tenant_weights, "lanes": config.lanes}
        policy = uncapped(policy)
        self._shared = policy if isinstance(policy, Shared) else None

    def settings(self) -> Settings:
        return dict(self._texts)

    def check(self, changes: Settings) -> None:
        shares = _parsed(changes)
        if "tenant_weights" in shares and not (self._shared is not None and self._shared.is_fair):
            raise ConfigError("tenant_weights needs tenants to have shares; restart with fair")
        if "lanes" in shares:
            have = list(self._shared.lanes) if self._shared is not None else []
            if sorted(shares["lanes"]) != sorted(have):
                allowed = f"other shares of {', '.join(have)}" if have else "none, as it was started without"
                raise ConfigError(f"lanes is {changes['lanes']!r}; allowed: {allowed}; other lanes need a restart")

    def apply(self, changes: Settings) -> None:
        assert self._shared is not None, "a check that passed found shares"
        shares = _parsed(changes)
        lanes = shares.get("lanes")
        ordered = None if lanes is None else {name: lanes[name] for name in self._shared.lanes}
        self._shared.reweigh(shares.get("tenant_weights"), ordered)
        self._texts |= changes


class PolicySettings:
    """Options of the policy that take effect at once: its queue asks for them, or for a key made of them."""

    def __init__(self, policy: Policy, queue: OrderedQueue) -> None:
        policy = uncapped(policy)
        self._policy = policy.base if isinstance(policy, Shared) else policy
        self._queue = ordered(queue)
        known = {} if self._policy.overrides("queue") else LIVE
        self.kinds: Mapping[str, SettingKind] = {
            name: kind for name, kind in known.items() if hasattr(self._policy, name)
        }

    def settings(self) -> Settings:
        values = {name: getattr(self._policy, name) for name in self.kinds}
        return {name: None if value == math.inf else value for name, value in values.items()}

    def check(self, changes: Settings) -> None:
        """Whatever is of its kind is taken."""

    def apply(self, changes: Settings) -> None:
        for name, value in changes.items():
            setattr(self._policy, name, math.inf if value is None else value)
        for queue in _rank_queues(self._queue):
            queue.tune(self._policy.share_every, self._policy.boost_after)


class WaitingLimit:
    """How many requests may wait; the engine refuses more."""

    kinds: Mapping[str, SettingKind] = {"max_waiting": _WHOLE}

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    @property
    def most(self) -> int:
        return self._config.max_waiting

    def settings(self) -> Settings:
        return {"max_waiting": self._config.max_waiting}

    def check(self, changes: Settings) -> None:
        replace(self._config, **changes)  # type: ignore[arg-type]  # says itself what is out of range

    def apply(self, changes: Settings) -> None:
        self._config = replace(self._config, **changes)  # type: ignore[arg-type]


def limits_of(config: SchedulerConfig, *, num_blocks: int, swaps: bool) -> Limits:
    """The limits of a configuration; a static batch is admitted whole and reserves memory for its longest answers."""
    is_continuous = config.batching == "continuous"
    return Limits(
        rows=config.num_slots,
        tokens=config.num_tokens,
        chunk=config.max_chunk_tokens,
        spare=num_blocks // 100,
        swaps=swaps,
        partial=config.max_partial_prefills if is_continuous else config.num_slots,
        preemptions=config.max_preemptions,
        admission=Admission(config.kv_admission if is_continuous else "reserve"),
        victims=Victims(config.victims),
        prefill=PrefillOrder(config.prefill_order),
    )


def _parsed(changes: Settings) -> dict[str, dict[str, float]]:
    return {name: parse_shares(text, name) for name, text in changes.items() if isinstance(text, str)}


def _rank_queues(queue: OrderedQueue) -> Iterator[RankQueue]:
    if isinstance(queue, RankQueue):
        yield queue
    elif isinstance(queue, ShareQueue):
        for inner in queue.queues():
            yield from _rank_queues(inner)
