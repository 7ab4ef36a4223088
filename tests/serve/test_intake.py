"""Room for bodies: bounded, given back, and not all of it any one client's."""

from __future__ import annotations

import pytest

from headway.errors import Overloaded
from headway.serve.intake import BodyIntake
from headway.serve.turns import LONG_BYTES

MEGABYTE = 1 << 20


async def test_what_is_refused_takes_no_room_and_gives_none_back() -> None:
    intake = BodyIntake(MEGABYTE, bytes_per_s=1e12)
    for _ in range(50):
        with pytest.raises(Overloaded), intake.reading("a") as room:
            await room.take(2 * MEGABYTE)
    with intake.reading("a") as room:
        await room.take(LONG_BYTES + MEGABYTE // 2)
        with intake.reading("b") as other:
            await other.take(LONG_BYTES + MEGABYTE // 2)
            with pytest.raises(Overloaded):
                await other.take(1)
    with intake.reading("a") as room:  # all of it is back
        await room.take(LONG_BYTES + MEGABYTE * 3 // 4)
    assert not intake._by_client


async def test_one_client_leaves_room_to_others_and_short_bodies_always_have_some() -> None:
    intake = BodyIntake(MEGABYTE, bytes_per_s=1e12)
    with intake.reading("a") as hog, intake.reading("b") as other, intake.reading("c") as short:
        await hog.take(LONG_BYTES + MEGABYTE * 3 // 4)
        with pytest.raises(Overloaded):
            await hog.take(1)
        await other.take(LONG_BYTES + MEGABYTE // 4)
        with pytest.raises(Overloaded):
            await other.take(1)
        await short.take(LONG_BYTES)


async def test_large_bodies_take_their_time_and_short_ones_none() -> None:
    intake = BodyIntake(bytes_per_s=MEGABYTE)
    with intake.reading("a") as room:
        assert await room.take(LONG_BYTES) == 0.0
        assert await room.take(MEGABYTE // 2) == 0.0  # within the burst
        assert await room.take(MEGABYTE // 20) > 0.04
