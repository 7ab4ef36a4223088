"""Options of the policies that come with headway: which values each takes, at the start and while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from headway.config_text import SettingKind

Option = float | int | str | None

_FROM_ZERO = SettingKind((int, float), "a number of at least 0", least=0.0)
_ABOVE_ZERO = SettingKind((int, float), "a number above 0", least=0.0, is_open=True)
_OR_NEVER = replace(_ABOVE_ZERO, words="a number above 0, or null for never", takes_null=True)

LIVE: Mapping[str, SettingKind] = {
    "beta": _FROM_ZERO,
    "aging": _FROM_ZERO,
    "patience": _ABOVE_ZERO,
    "share_every": SettingKind((int,), "a whole number of at least 0", least=0.0),
    "boost_after": _OR_NEVER,
}
"""Those that take effect at once when they change; the others need a restart."""

OPTIONS: Mapping[str, SettingKind] = {
    **LIVE,
    "quantum": SettingKind((int, float), "a number of at least 0.000001", least=1e-6),
    "promote_after": _OR_NEVER,
    "spare": SettingKind((int, float), "a share of the memory, from 0 to 1", least=0.0, most=1.0),
    "least_itl": _FROM_ZERO,
}


def checked(options: Mapping[str, Option]) -> dict[str, Option]:
    """What a constructor is given for these; ConfigError for a value that the option does not take."""
    given: dict[str, Option] = {}
    for name, value in options.items():
        kind = OPTIONS[name]
        is_never = kind.takes_null and value in (None, math.inf)
        kind.check(f"policy_options {name}", None if is_never else value)
        given[name] = math.inf if is_never else value
    return given
