"""Steps that cost what these weights say, for tests of parts that learn or predict costs."""

from __future__ import annotations

from headway.control.costs import CostWeights

PLANTED = CostWeights(
    base=5e-3, mixed=1e-3, tokens=0.2e-3, pairs=2e-8, decode=0.1e-3, context=1e-6, chunks=0.3e-3, copies=0.05e-3
)
