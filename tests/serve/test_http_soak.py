"""`tools/http_soak.py` on a thousand requests against the server in this process, whose tasks can be counted."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from echo_engine import EchoEngine
from headway.engine.published import Published
from http_soak import Soaked, slope, storm
from serve_harness import Harness, serving


async def _tasks() -> int:
    return len(asyncio.all_tasks())


def _storm(server: Harness, count: int, soaked: Soaked) -> None:
    where = urlsplit(server.url)
    assert where.hostname is not None
    assert where.port is not None
    asyncio.run(storm(where.hostname, where.port, count, 24, soaked))


def test_a_thousand_requests_leave_nothing_behind() -> None:
    soaked = Soaked()
    with serving(EchoEngine(eos_after=9)) as server:
        _storm(server, 50, soaked)
        server.wait_idle()
        num_tasks, num_lines = server.do(_tasks), len(server.service.metrics.page().splitlines())
        _storm(server, 1000, soaked)
        server.wait_idle()
        assert soaked.wrong == []
        assert soaked.count == 1050
        assert set(soaked.statuses) <= {200, 400, 404}
        assert server.do(_tasks) <= num_tasks
        assert len(server.service.metrics.page().splitlines()) == num_lines
        guard = server.service.guard
        assert not guard._waiting
        assert not guard._by_tenant
        assert not guard._sent
        assert not server.service._open_ids


def test_refusals_of_a_full_server_are_503_with_a_time() -> None:
    engine, soaked = EchoEngine(), Soaked()
    with serving(engine) as server:
        engine.published = Published(num_waiting=9, each_s=9.0, waits={"": 81.0})
        server.client.published = engine.published
        _storm(server, 100, soaked)
        assert soaked.wrong == []
        assert soaked.statuses[503] > 40
        assert soaked.statuses[200] == 0


def test_slope_is_bytes_for_each_request() -> None:
    assert round(slope([(0, 100.0), (1000, 101.0), (2000, 102.0)])) == 1000
