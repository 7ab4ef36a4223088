"""The baselines: a batch enters when nobody runs, and all of it ends together."""

from __future__ import annotations

from headway.control.gates import BatchGate


def test_a_static_batch_waits_for_nobody_to_run() -> None:
    gate = BatchGate(4)
    assert gate.seats(now=0.0, num_running=0, num_waiting=9, oldest=0.0) == 4
    assert gate.seats(now=0.0, num_running=1, num_waiting=9, oldest=0.0) == 0
    assert gate.seats(now=0.0, num_running=0, num_waiting=1, oldest=0.0) == 4


def test_a_dynamic_batch_leaves_when_it_is_full_or_its_oldest_has_waited() -> None:
    gate = BatchGate(4, window=2.0)
    assert gate.seats(now=1.0, num_running=0, num_waiting=3, oldest=0.0) == 0
    assert gate.seats(now=1.0, num_running=0, num_waiting=4, oldest=0.0) == 4
    assert gate.seats(now=2.0, num_running=0, num_waiting=3, oldest=0.0) == 4
