"""Whose cached prefixes a request may find: its tenant's, by an opaque name that only this server can make.

A namespace is HMAC-SHA256 of a secret and the tenant. The secret is kept in a file, so that a tenant has the same
namespace in every process and after a restart, and tenants' names are not enough to make one.
"""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from headway.errors import ConfigError

MIN_SECRET_CHARS = 32
_SECRET_BYTES = 32


class Namespaces:
    """Equal for equal tenants, and for no others. Without a secret there is one namespace for all."""

    def __init__(self, secret: bytes | None = None, *, trusts_user: bool = False) -> None:
        self._secret = secret
        self._trusts_user = trusts_user

    def of(self, tenant: str, user: str | None) -> bytes:
        """The namespace of a tenant, and of its user where the operator trusts that field."""
        if self._secret is None:
            return b""
        named = (tenant, (user or "") if self._trusts_user else "")
        parts = [part.encode("utf-8", "surrogatepass") for part in named]
        message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self._secret, message, "sha256")


def read_secret(file: Path, *, is_made: bool) -> bytes:
    """The secret in this file; with `is_made` it is drawn and written there if there is none."""
    if is_made:
        _make(file)
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise ConfigError(f"cannot read the cache secret {file}: {reason}; name another with --cache-secret") from None
    if len(text) < MIN_SECRET_CHARS:
        what = f"the cache secret {file} has {len(text)} characters; allowed: {MIN_SECRET_CHARS} or more"
        raise ConfigError(f"{what}, such as openssl rand -hex 32 prints")
    return text.encode()


def _make(file: Path) -> None:
    """Complete or not there, also if another process makes it too: written apart, then linked to its name."""
    if file.exists():
        return
    draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secrets.token_hex(_SECRET_BYTES) + "\n")
            out.flush()
            os.fsync(out.fileno())
        with suppress(FileExistsError):
            os.link(draft, file)
    except OSError as error:
        raise ConfigError(
            f"cannot write the cache secret {file}: {error.strerror}; name one with --cache-secret"
        ) from None
    finally:
        draft.unlink(missing_ok=True)
