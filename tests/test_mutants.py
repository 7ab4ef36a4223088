"""The seeded bugs of `scripts/mutants` still fit the code they are sown into; the run itself takes minutes."""

from __future__ import annotations

import pytest

from mutants import MUTANTS, Mutant, place_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_what_a_mutant_replaces_stands_there_once(mutant: Mutant) -> None:
    assert place_of(mutant).read_text(encoding="utf-8").count(mutant.old) == 1
