"""What of a running scheduler may change: limits, targets, shares and the options of its policy; never its shape.

A change is all or nothing: everything is checked before anything is touched. It takes effect with the next plan, and
no request is dropped for it: with fewer seats than are taken, nobody sits down until enough have got up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace

from headway.config import SchedulerConfig, parse_options, parse_shares
from headway.control.pacer import TargetPacer
from headway.core.queue import RankQueue, WaitQueue
from headway.core.scheduler import Scheduler
from headway.engine.client import Settings
from headway.errors import ConfigError
from headway.policies._shared import Shared
from headway.policies._shares import ShareQueue
from headway.values.limits import Admission, Limits, PrefillOrder, Victims

FIELDS = (
    "target_itl_ms",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_chunk_tokens",
    "max_partial_prefills",
    "prefill_order",
    "kv_admission",
    "victims",
    "tenant_weights",
    "lanes",
    "max_waiting",
)
"""Of `SchedulerConfig`."""

# Policy option -> the least it may be, and whether that itself is allowed.
OPTIONS = {
    "beta": (0.0, True),
    "aging": (0.0, True),
    "patience": (0.0, False),
    "share_every": (0, True),
    "boost_after": (0.0, False),
}
_KINDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "None": "null"}
_TYPES = {field.name: field.type.split(" | ") for field in fields(SchedulerConfig) if isinstance(field.type, str)}


def limits_of(config: SchedulerConfig, *, num_blocks: int, swaps: bool) -> Limits:
    """The limits that a configuration asks for; a batch sits down as a whole and has memory for its longest."""
    is_continuous = config.batching == "continuous"
    return Limits(
        rows=config.num_seats,
        tokens=config.num_tokens,
        chunk=config.max_chunk_tokens,
        spare=num_blocks // 100,
        swaps=swaps,
        partial=config.max_partial_prefills if is_continuous else config.num_seats,
        preemptions=config.max_preemptions,
        admission=Admission(config.kv_admission if is_continuous else "reserve"),
        victims=Victims(config.victims),
        prefill=PrefillOrder(config.prefill_order),
    )


class Tuning:
    """The configuration in force of one scheduler, and the one way to change it."""

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._most_rows = scheduler.state.limits.rows
        # Seats that followed from other fields stay those there are, whatever becomes of these fields.
        self.config = replace(config, max_num_seqs=self._most_rows)
        policy = scheduler.state.policy
        self._shared = policy if isinstance(policy, Shared) else None
        self._base = policy.base if isinstance(policy, Shared) else policy

    def settings(self) -> Settings:
        """What is in force now; every name here may be changed."""
        found: Settings = {name: getattr(self.config, name) for name in FIELDS}
        limits = self._scheduler.state.limits
        found |= {"max_num_batched_tokens": limits.tokens, "max_partial_prefills": limits.partial}
        found["kv_admission"] = limits.admission.value
        for name in self._options():
            value = getattr(self._base, name)
            found[name] = None if value == math.inf else value
        return found

    def change(self, changes: Settings) -> None:
        """Put other values into force, all of them or none; ConfigError says which is at fault."""
        now = self.settings()
        asked = _spelled_out(changes)
        for name, value in asked.items():
            if name not in now:
                raise ConfigError(self._unchangeable(name, now))
            _check_kind(name, value)
        if "max_num_seqs" in asked and asked["max_num_seqs"] is None:
            asked["max_num_seqs"] = self._most_rows
        asked = {name: value for name, value in asked.items() if value != now[name]}
        options = {name: asked.pop(name) for name in OPTIONS if name in asked}
        config = replace(self.config, **asked)  # type: ignore[arg-type]  # raises ConfigError for what is out of range
        self._check(config, asked)
        self._put(config, asked)
        if options:
            self._put_options(options)

    def _check(self, config: SchedulerConfig, asked: Settings) -> None:
        if config.num_seats > self._most_rows:
            allowed = f"up to {self._most_rows}, the seats it started with"
            raise ConfigError(f"max_num_seqs is {config.num_seats}; allowed: {allowed}; more need a restart")
        for name, fixed in (("kv_admission", "reserve"), ("max_partial_prefills", "the whole batch")):
            if name in asked and config.batching != "continuous":
                raise ConfigError(f"{name} is always {fixed} with batching {config.batching}; leave it out")
        if "tenant_weights" in asked and not (self._shared is not None and self._shared.is_fair):
            raise ConfigError("tenant_weights needs tenants to have shares; restart with fair")
        if "lanes" in asked:
            have = list(self._shared.lanes) if self._shared is not None else []
            names = list(parse_shares(config.lanes, "lanes"))
            if sorted(names) != sorted(have):
                allowed = f"other shares of {', '.join(have)}" if have else "none, as it was started without"
                raise ConfigError(f"lanes is {config.lanes!r}; allowed: {allowed}; other lanes need a restart")

    def _put(self, config: SchedulerConfig, asked: Settings) -> None:
        scheduler = self._scheduler
        num_blocks, swaps = scheduler.state.ledger.pool.num_blocks, scheduler.state.limits.swaps
        scheduler.reconfigure(limits_of(config, num_blocks=num_blocks, swaps=swaps))
        if isinstance(scheduler.state.pacer, TargetPacer):
            scheduler.state.pacer.target = None if config.target_itl_ms is None else config.target_itl_ms / 1e3
        if self._shared is not None and ("tenant_weights" in asked or "lanes" in asked):
            lanes = parse_shares(config.lanes, "lanes")
            ordered = {name: lanes[name] for name in self._shared.lanes}
            self._shared.reweigh(parse_shares(config.tenant_weights, "tenant_weights"), ordered or None)
        self.config = config

    def _put_options(self, options: Settings) -> None:
        for name, value in options.items():
            setattr(self._base, name, math.inf if value is None else value)
        for queue in _rank_queues(self._scheduler.state.waiting.queue):
            queue.tune(self._base.share_every, self._base.boost_after)

    def _options(self) -> list[str]:
        """Those of the policy that take effect at once: its queue asks for them, or for a key made of them."""
        if self._base.overrides("queue"):
            return []
        return [name for name in OPTIONS if hasattr(self._base, name)]

    def _unchangeable(self, name: str, now: Settings) -> str:
        why = "needs a restart" if name in _TYPES else f"is not a setting of policy {self.config.policy!r}"
        return f"{name!r} cannot be changed while it runs: it {why}; allowed: {', '.join(now)}"


def _spelled_out(changes: Settings) -> Settings:
    """`policy_options` as a text means the options it names."""
    text = changes.get("policy_options")
    if not isinstance(text, str):
        return dict(changes)
    rest = {name: value for name, value in changes.items() if name != "policy_options"}
    return {**rest, **parse_options(text, "policy_options")}


def _check_kind(name: str, value: bool | int | float | str | None) -> None:
    if name in OPTIONS:
        least, is_allowed = OPTIONS[name]
        if value is None and name == "boost_after":
            return
        is_number = isinstance(value, int if isinstance(least, int) else int | float) and not isinstance(value, bool)
        if not is_number or not (least < value < 1e9 or (is_allowed and value == least)):  # type: ignore[operator]
            kind = "a whole number" if isinstance(least, int) else "a number"
            also = ", or null for never" if name == "boost_after" else ""
            raise ConfigError(
                f"{name} is {value!r}; allowed: {kind} {'of at least' if is_allowed else 'above'} 0{also}"
            )
        return
    kinds = _TYPES[name]
    given = "None" if value is None else type(value).__name__
    fits = given in kinds or (given == "int" and "float" in kinds)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{name} is {value!r}; allowed: {' or '.join(_KINDS[kind] for kind in kinds)}")


def _rank_queues(queue: WaitQueue) -> Iterator[RankQueue]:
    if isinstance(queue, RankQueue):
        yield queue
    elif isinstance(queue, ShareQueue):
        for inner in queue.queues():
            yield from _rank_queues(inner)
