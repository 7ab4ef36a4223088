"""The anchors of the seeded bugs of `scripts/mutants` occur in the code, and a sample of the bugs is caught.

All of them take minutes. `--mutants-seed` chooses another sample.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from mutants import MUTANTS, Mutant, Verdict, judge, place_of, sample


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_what_a_mutant_replaces_occurs_once(mutant: Mutant) -> None:
    assert place_of(mutant).read_text(encoding="utf-8").count(mutant.old) == 1


def test_a_sample_of_them_is_caught(request: pytest.FixtureRequest) -> None:
    chosen = sample(request.config.getoption("--mutants-seed"), 8)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        survivors = [MUTANTS[index].what for index, verdict in pool.map(judge, chosen) if verdict is Verdict.SURVIVED]
    assert not survivors
