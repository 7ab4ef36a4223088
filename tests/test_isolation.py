"""`tools/isolation.py` on few probes: nothing of another tenant is told, and one's own prefix is still found."""

from __future__ import annotations

import pytest

from isolation import auc, measure


def test_auc_counts_right_pairs_and_half_of_ties() -> None:
    assert auc([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert auc([3.0, 4.0], [1.0, 2.0]) == 0.0
    assert auc([1.0, 4.0], [2.0, 3.0]) == 0.5
    assert auc([1.0], [1.0]) == 0.5


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_tenant_finds_its_own_prefix_and_no_other(is_shared: bool) -> None:
    found = measure(8, 512, *(["--shared-cache"] if is_shared else []))
    assert found.own_cached == 8 * 511
    assert found.foreign_cached == (8 * 511 if is_shared else 0)  # the same probes see what is shared
