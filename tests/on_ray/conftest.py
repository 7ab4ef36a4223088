"""These tests need Ray: `scripts/test-ray` installs it and runs them. Elsewhere they are no tests."""

from __future__ import annotations

import shutil

from headway.extras import has_ray

collect_ignore_glob = [] if has_ray() else ["*"]
if shutil.which("redis-server") is None:  # `scripts/test-ray` says so
    collect_ignore_glob.append("test_redis.py")
