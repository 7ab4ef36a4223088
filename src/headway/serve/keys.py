"""The file of `--keys`: which API key belongs to which tenant, with what weight and limits.

    [tenants.ann]
    keys = ["sk-ann-1", "sha256:6c1e…"]     # several while one is replaced; a digest keeps the key out of the file
    weight = 2                              # with --fair: twice the share of the others
    requests_per_minute = 600
    tokens_per_minute = 100000
    concurrency = 8                         # requests under way

Every field but `keys` may be left out. Light on purpose: it is read before the engine process starts.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from headway.config import EngineConfig
from headway.config_text import parse_shares
from headway.errors import ConfigError

log = logging.getLogger(__name__)

MAX_KEY_CHARS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")  # what a header can carry without quoting


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays for a request. None: no limit."""

    name: str
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


class Keyring:
    """Tenants by key. A lookup takes as long for a key that is nearly right as for any other wrong one."""

    def __init__(self, tenants: Mapping[str, Tenant], digests: Mapping[bytes, str]) -> None:
        self.tenants = dict(tenants)
        # The table is keyed by a digest under a secret of this process: what a lookup compares cannot be steered.
        self._secret = secrets.token_bytes(32)
        self._by_digest = {self._seal(digest): (digest, name) for digest, name in digests.items()}

    def find(self, key: bytes) -> Tenant | None:
        """The tenant of this key."""
        digest = hashlib.sha256(key).digest()
        known, name = self._by_digest.get(self._seal(digest), (b"", ""))
        return self.tenants[name] if hmac.compare_digest(known, digest) else None

    def weights(self, others: str = "") -> str:
        """Those that are not 1, beside others that are given in the form of `tenant_weights`, in that form."""
        own = {each.name: each.weight for each in self.tenants.values() if each.weight != 1.0}
        merged = {**parse_shares(others, "tenant_weights"), **own}
        return ",".join(f"{name}={weight:g}" for name, weight in merged.items())

    def _seal(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def read_keys(path: str) -> Keyring:
    """The file as it is now; ConfigError says where it is wrong, and never shows a key."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        is_open = bool(file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the keys file {path}: {reason}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at .*\)$", str(error))  # the rest of the message may quote a key
        raise ConfigError(f"the keys file {path} is not TOML {where[0] if where else ''}".rstrip()) from None
    if is_open:
        log.warning("the keys file %s can be read by other users; chmod 600 it", path)
    return _keyring(data, path)


def weighted(config: EngineConfig, keyring: Keyring) -> EngineConfig:
    """The configuration of an engine that shares by the weights of the file."""
    scheduler = config.scheduler
    if keyring.weights() and not (scheduler.fair or scheduler.policy == "fair"):
        raise ConfigError("the keys file gives tenants a weight, but tenants have no shares; add --fair")
    return replace(config, scheduler=replace(scheduler, tenant_weights=keyring.weights(scheduler.tenant_weights)))


def _keyring(data: Mapping[str, Any], path: str) -> Keyring:
    tables = data.get("tenants")
    if set(data) != {"tenants"} or not isinstance(tables, dict) or not tables:
        raise ConfigError(f"the keys file {path} needs a table [tenants.NAME] for each tenant, and nothing else")
    tenants: dict[str, Tenant] = {}
    owners: dict[bytes, str] = {}
    for name, table in tables.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{path}: a tenant is called {name[:80]!r}; allowed: 1 to 64 letters, digits, . - and _")
        tenants[name] = _tenant(name, table, path)
        for digest in _digests(table.get("keys"), f"{path}: keys of {name}"):
            if owners.setdefault(digest, name) != name:
                raise ConfigError(f"{path}: {owners[digest]} and {name} have the same key; give each its own")
    return Keyring(tenants, owners)


def _tenant(name: str, table: object, path: str) -> Tenant:
    limits = [each.name for each in fields(Tenant) if each.name != "name"]
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} is {type(table).__name__}; allowed: a table with keys")
    for field, value in table.items():
        if field == "keys":
            continue
        if field not in limits:
            raise ConfigError(f"{path}: {name} has {field[:80]!r}; allowed: keys, {', '.join(limits)}")
        kinds = (int, float) if field == "weight" else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e9:
            allowed = "a number above 0" if field == "weight" else "a whole number of 1 or more; leave it out for none"
            raise ConfigError(f"{path}: {field} of {name} is {value!r}; allowed: {allowed}")
    return Tenant(name, **{field: value for field, value in table.items() if field != "keys"})


def _digests(given: object, what: str) -> Iterator[bytes]:
    if not isinstance(given, list) or not given:
        raise ConfigError(f'{what}: allowed: a list of at least one, such as ["sk-1"]')
    for key in given:
        if isinstance(key, str) and (found := _DIGEST.fullmatch(key)):
            yield bytes.fromhex(found[1])
        elif isinstance(key, str) and _KEY.fullmatch(key) and not key.lower().startswith("sha256:"):
            yield hashlib.sha256(key.encode()).digest()
        else:
            allowed = f"1 to {MAX_KEY_CHARS} printable ASCII characters without blanks, or sha256: and 64 hex digits"
            raise ConfigError(f"{what}: one of them is not a key; allowed: {allowed}")
