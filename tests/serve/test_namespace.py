"""Cached prefixes are a tenant's own: equal namespaces for equal tenants across restarts, and for no others."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from echo_engine import EchoEngine
from headway.errors import ConfigError
from headway.serve.namespace import Namespaces, read_secret
from serve_harness import serving
from tenant_kit import ANN, BOB, ask, keys_file


def test_namespaces_differ_by_tenant_and_secret_and_say_nothing_else() -> None:
    one, other = Namespaces(b"s" * 32), Namespaces(b"t" * 32)
    assert one.of("ann", None) == Namespaces(b"s" * 32).of("ann", None)
    assert len({one.of("ann", None), one.of("bob", None), one.of("", None), other.of("ann", None)}) == 4
    assert one.of("ann", "x") == one.of("ann", None)
    trusting = Namespaces(b"s" * 32, trusts_user=True)
    assert (
        len({trusting.of("ann", "x"), trusting.of("ann", "y"), trusting.of("annx", ""), trusting.of("ann", None)}) == 4
    )
    assert b"ann" not in one.of("ann", None)
    assert Namespaces().of("ann", "x") == Namespaces(trusts_user=True).of("bob", "y") == b""


def test_a_secret_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "new" / "cache-secret"
    secret = read_secret(file, is_made=True)
    assert len(secret) == 64
    assert read_secret(file, is_made=True) == read_secret(file, is_made=False) == secret
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.name for each in file.parent.iterdir()] == ["cache-secret"]


def test_a_secret_that_is_missing_or_short_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the cache secret"):
        read_secret(tmp_path / "none", is_made=False)
    (tmp_path / "short").write_text("hunter2")
    with pytest.raises(ConfigError, match="has 7 characters; allowed: 32 or more"):
        read_secret(tmp_path / "short", is_made=False)


def test_tenants_have_namespaces_that_last_and_a_keyless_server_has_one(tmp_path: Path) -> None:
    keys = str(keys_file(tmp_path))
    seen: list[list[bytes]] = []
    for _ in range(2):  # a restart
        engine = EchoEngine()
        with serving(engine, keys=keys, home=tmp_path) as server:
            for key in (ANN, BOB, ANN):
                assert ask(server, key, cache_salt="s")[0] == 200
            assert ask(server, BOB, user="ann")[0] == 200
        seen.append([submit.namespace for submit in engine.submits])
        assert [submit.salt for submit in engine.submits] == ["s", "s", "s", ""]
    ann, bob, again, claimed = seen[0]
    assert ann == again != bob == claimed
    assert ann
    assert seen[0] == seen[1]
    engine = EchoEngine()
    with serving(engine) as server:
        for key in ("a", "b"):
            assert ask(server, key, user=key)[0] == 200
    assert {submit.namespace for submit in engine.submits} == {b""}


def test_shared_cache_and_trusted_users_are_the_operators_choice(tmp_path: Path) -> None:
    for options, num_namespaces in (({"shared_cache": True}, 1), ({"trust_user": True}, 4)):
        engine = EchoEngine()
        with serving(engine, keys=str(keys_file(tmp_path)), home=tmp_path, **options) as server:
            for key in (ANN, BOB):
                for user in ("x", "y"):
                    ask(server, key, user=user)
        assert len({submit.namespace for submit in engine.submits}) == num_namespaces
