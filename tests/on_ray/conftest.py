"""These tests need Ray: `scripts/test-ray` installs it and runs them. Elsewhere they are no tests."""

from __future__ import annotations

from headway.extras import has_ray

collect_ignore_glob = [] if has_ray() else ["*"]
