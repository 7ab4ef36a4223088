"""How the engine's process collects garbage: while the executor computes, and never what lives for ever."""

from __future__ import annotations

import gc

YOUNG = 5_000  # net allocations after which young objects are looked at; takes a millisecond, long prompts more
OLD = 2_000  # such looks after which their survivors are looked at too
BACKSTOP = 20 * YOUNG


def settle_garbage(has_loop: bool = False) -> None:
    """Call once everything long-lived is built. A full collection in a step would be felt as a pause.

    What exists now is frozen out of every later collection. Requests form no reference cycles, so hardly anything is
    left to find. A process whose loop calls `collect_young` collects by itself only if that loop stands still.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(BACKSTOP if has_loop else YOUNG, OLD, 100)


def collect_young() -> None:
    """Collect if it is time to; called while a plan is with the executor, so that it delays no step."""
    young, old, _ = gc.get_count()
    if young >= YOUNG and gc.isenabled():
        gc.collect(1 if old >= OLD else 0)
