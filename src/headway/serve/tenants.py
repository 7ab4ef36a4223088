"""Who a request comes from: its key becomes a tenant, with limits and a namespace of its own.

A server asks for nothing, for one key (`--api-key`), or for a key of a file (`--keys`). Only with a file are there
several tenants; the file is read again on SIGHUP, and requests under way go on as they are.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.types import Scope

from headway.config import ServerConfig
from headway.serve.keys import Keyring, Tenant, read_keys
from headway.serve.namespace import Namespaces, read_secret
from headway.serve.problem import Problem
from headway.serve.ratelimit import TenantLimits, Visit

log = logging.getLogger(__name__)

TENANT = "headway.tenant"
"""Where a request's scope has its `Tenant`; it is None where no file says who is who."""
VISIT = "headway.visit"


class Tenants:
    """Every request that passes `identify` has a valid key, if one is asked for."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        keyring: Keyring | None = None,
        secret: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.namespaces = Namespaces(secret, trusts_user=config.trust_user)
        self.keyring = keyring
        self._path = config.keys
        self._key = None if config.api_key is None else config.api_key.encode()
        self._clock = clock
        self._limits: dict[str, TenantLimits] = {}

    @staticmethod
    def open(config: ServerConfig, home: Path) -> Tenants:
        """As the configuration says; a secret that no file holds yet is made in the folder `home`."""
        keyring = None if config.keys is None else read_keys(config.keys)
        return Tenants(config, keyring=keyring, secret=_secret(config, home))

    def identify(self, headers: Mapping[bytes, bytes]) -> Tenant | None:
        """Whose request it is; Problem 401 without a valid key. None: the server does not tell tenants apart."""
        if self._key is None and self.keyring is None:
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        is_bearer = scheme.lower() == b"bearer"
        if self.keyring is not None:
            found = self.keyring.find(key)
            if is_bearer and found is not None:
                return found
        elif self._key is not None and hmac.compare_digest(key, self._key) and is_bearer:
            return None
        message = "no valid API key; send it as the header Authorization: Bearer KEY"
        closing = {"www-authenticate": "Bearer"}
        raise Problem(401, message, type="authentication_error", code="invalid_api_key", headers=closing)

    def visit(self, scope: Scope) -> Visit:
        """A request for answers begins: to be entered, which may raise Problem 429."""
        tenant: Tenant | None = scope.get(TENANT)
        limits = None if tenant is None else self._limits_of(tenant)
        visit = scope[VISIT] = Visit(limits, self._clock)
        return visit

    def reload(self) -> Keyring | None:
        """Read the keys file again, all or nothing, if there is one. ConfigError: nothing was changed."""
        if self._path is None:
            return None
        keyring = read_keys(self._path)
        self.keyring = keyring
        self._limits = {
            name: limits for name, limits in self._limits.items() if name in keyring.tenants or limits.num_open
        }
        for name in self._limits.keys() & keyring.tenants.keys():
            self._limits[name].change(keyring.tenants[name], self._clock())
        log.info("SIGHUP: the keys file has %d tenants now", len(keyring.tenants))
        return keyring

    def _limits_of(self, tenant: Tenant) -> TenantLimits:
        limits = self._limits.get(tenant.name)
        if limits is None:
            # As the file is now: it may have been read again since this request came.
            now = tenant if self.keyring is None else self.keyring.tenants.get(tenant.name, tenant)
            limits = self._limits[tenant.name] = TenantLimits(now, self._clock())
        return limits


def _secret(config: ServerConfig, home: Path) -> bytes | None:
    """None where all share one namespace."""
    if config.shared_cache or not (config.keys is not None or config.trust_user):
        return None
    if config.cache_secret is not None:
        return read_secret(Path(config.cache_secret).expanduser(), is_made=False)
    return read_secret(home / "cache-secret", is_made=True)
