"""Settings of a running scheduler: limits, targets, shares and the options of its policy; never its shape.

A change is all or nothing: every owner checks its part before any of them applies it. It takes effect with the next
plan, and no request is dropped for it: with fewer slots than running requests, none is admitted until enough ended.
"""

from __future__ import annotations

from dataclasses import fields

from headway.config import SchedulerConfig
from headway.config_text import parse_options
from headway.core.scheduler import Scheduler
from headway.engine.client import Settings
from headway.engine.settings import LimitSettings, Owner, PolicySettings, ShareSettings, WaitingLimit
from headway.errors import ConfigError


class Tuning:
    """The owners of one scheduler's settings, and the one way to change them. A name belongs to one owner."""

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler) -> None:
        self._policy = config.policy
        self._waiting = WaitingLimit(config)
        self._owners: tuple[Owner, ...] = (
            LimitSettings(config, scheduler),
            ShareSettings(config, scheduler.state.policy),
            self._waiting,
            PolicySettings(scheduler.state.policy, scheduler.state.waiting.queue),
        )

    @property
    def max_waiting(self) -> int:
        return self._waiting.most

    def settings(self) -> Settings:
        """What is in force now; every name here may be changed."""
        return {name: value for owner in self._owners for name, value in owner.settings().items()}

    def change(self, changes: Settings) -> None:
        """Put other values into force, all of them or none; ConfigError says which is at fault."""
        asked, now = _spelled_out(changes), self.settings()
        unknown = [name for name in asked if name not in now]
        if unknown:
            raise ConfigError(self._unchangeable(unknown[0], now))
        parts: list[tuple[Owner, Settings]] = []
        for owner in self._owners:
            mine = {name: asked[name] for name in owner.kinds if name in asked}
            for name, value in mine.items():
                owner.kinds[name].check(name, value)
            news = {name: value for name, value in mine.items() if value != now[name]}
            if news:
                parts.append((owner, news))
        for owner, news in parts:
            owner.check(news)
        for owner, news in parts:
            owner.apply(news)

    def _unchangeable(self, name: str, now: Settings) -> str:
        is_config = name in {field.name for field in fields(SchedulerConfig)}
        why = "needs a restart" if is_config else f"is not a setting of policy {self._policy!r}"
        return f"{name!r} cannot be changed while it runs: it {why}; allowed: {', '.join(now)}"


def _spelled_out(changes: Settings) -> Settings:
    """`policy_options` as a text means the options it names."""
    text = changes.get("policy_options")
    if not isinstance(text, str):
        return dict(changes)
    rest = {name: value for name, value in changes.items() if name != "policy_options"}
    return {**rest, **parse_options(text, "policy_options")}
