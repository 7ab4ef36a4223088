"""Engines that dial in: they work at once; what they hold goes on elsewhere, token for token, when they are gone."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

import echo_child
from echo_join import killed, start_echo
from echo_streams import rest
from headway.cluster.dial import Dialer
from headway.cluster.fronts import FrontsPort
from headway.engine.client import EngineInfo, Submit
from headway.engine.messages import Alive, Ready, Reconfigure, Reconfigured, Shutdown
from headway.errors import RequestError
from headway.serve.problem import problem_of
from joined_fleet import KEY, begin, engine_of, front, joined, params, port_of, require_whole, until


async def test_engines_that_join_serve_a_front_that_has_none() -> None:
    async with joined(2, key=KEY) as (client, _):
        begun = await begin(client, 8, 100)
        assert sorted(len(each.engine.entries) for each in client.replicas) == [4, 4]
        await require_whole(begun, 100)
        assert (await client.stats()).finished == {"length": 8}


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_requests_of_an_engine_that_is_gone_go_on_elsewhere(sig: signal.Signals) -> None:
    async with joined(2, own=1) as (client, engines):
        begun = await begin(client, 9, 900)
        gone = engine_of(client, engines[0])
        assert gone.entries
        began = time.monotonic()
        os.kill(engines[0].pid, sig)
        while gone.entries:
            await asyncio.sleep(0.005)
        assert time.monotonic() - began < (4.0 if sig == signal.SIGSTOP else 1.0)
        await require_whole(begun, 900)


async def test_an_engine_that_was_stopped_comes_back_and_its_stale_tokens_are_dropped() -> None:
    async with joined(2) as (client, engines):
        begun = await begin(client, 6, 1200)
        os.kill(engines[0].pid, signal.SIGSTOP)
        await until(client, 1)
        os.kill(engines[0].pid, signal.SIGCONT)
        await until(client, 2)
        assert len(client.replicas) == 2, "it is known again"
        await require_whole(begun, 1200)


async def test_an_engine_that_ends_as_planned_leaves_its_front_for_good(caplog: pytest.LogCaptureFixture) -> None:
    async with front() as client:
        port = FrontsPort("e", "i", 1, lambda: None)
        dialer = Dialer([("127.0.0.1", port_of(client))], None, None, port, lambda: Alive(0, False, 0.0))
        port.send([Ready(EngineInfo("echo", 512, 320, 16, 64, 8))])
        dialer.start()
        try:
            while not any(each.engine.is_up for each in client.replicas):
                port.receive(0)
                await asyncio.sleep(0.005)
            port.stop()
            assert Shutdown() in port.receive(0)
            began = time.monotonic()
            while dialer._thread.is_alive():
                assert time.monotonic() - began < 5, "it dials again while its engine ends"
                await asyncio.sleep(0.005)
            assert "dialled again" not in caplog.text
        finally:
            dialer.stop()


async def test_an_engine_keeps_its_model_when_its_front_is_gone_and_joins_the_next_one() -> None:
    async with front() as client:
        port = port_of(client)
        with killed([start_echo(port, "e")]) as engines:
            await until(client, 1)
            await require_whole(await begin(client, 2, 20), 20)
            await client.close(0.1)
            async with front(port=port) as again:
                await until(again, 1)
                assert again.replicas[0].engine.pid == engines[0].pid
                await require_whole(await begin(again, 2, 20), 20)


async def test_two_fronts_share_an_engine_and_one_that_vanishes_leaves_nothing_behind() -> None:
    async with front() as one, front() as two:
        both = f"127.0.0.1:{port_of(one)},127.0.0.1:{port_of(two)}"
        with killed([start_echo(0, "e", join=both)]):
            await until(one, 1)
            await until(two, 1)
            here, there = await begin(one, 3, 100_000), await begin(two, 3, 600)
            assert (await two.stats()).running == 6
            await one.close(0.1)
            await require_whole(there, 600)
            assert (await two.stats()).running == 0, "what the other front asked for was aborted"
            assert all([(await rest(stream))[1].finish == "error" for _, stream in here.values()])


async def test_a_new_engine_works_at_once_and_a_drained_one_finishes_what_it_has() -> None:
    async with joined(1) as (client, engines):
        begun = await begin(client, 4, 800)
        with killed([start_echo(port_of(client), "late")]) as more:
            more[0].wait_ready()
            began = time.monotonic()
            await until(client, 2)
            stream = client.submit(Submit(50, [70, 71], params(5)))
            assert client._home[50].engine.name == "late"
            await rest(stream)
            assert time.monotonic() - began < 1.0
            await client.drain("e0", grace_s=0.05)
            assert [each.engine.name for each in client.replicas] == ["late"]
            await require_whole(begun, 800)
            assert engines[0].process.wait(5) == 0
            with pytest.raises(RequestError, match="only one"):
                await client.drain("late")
            with pytest.raises(RequestError, match="no replica"):
                await client.drain("e0")


async def test_a_front_that_has_no_process_of_its_own_says_that_it_restarts_none() -> None:
    async with joined(1) as (client, engines):
        with pytest.raises(RequestError, match=r"restarted where they run, by SIGTERM") as refused:
            await client.restart()
        assert problem_of(refused.value).status == 409
        assert engines[0].process.poll() is None


async def test_a_request_goes_to_engines_whose_pool_holds_it() -> None:
    """One has room for 3,200 tokens, one for 320: what is long goes on in neither place but the first."""
    async with front() as client:
        small, large = (start_echo(port_of(client), name, num_blocks=n) for name, n in (("small", 20), ("large", 200)))
        with killed([small, large]):
            await until(client, 2)
            begun = await begin(client, 6, 800)
            assert [len(engine_of(client, each).entries) for each in (small, large)] == [0, 6]
            with pytest.raises(RequestError, match=r"need the KV of 3202 tokens; the largest pool .* has 3200"):
                client.submit(Submit(50, [65, 66, 67], params(3200)))
            fits = client.submit(Submit(51, [65, 66, 67], params(3198)))
            os.kill(large.pid, signal.SIGKILL)
            await until(client, 1)
            assert not engine_of(client, small).entries, "they wait for one that holds them"
            await rest(client.submit(Submit(52, [65, 66, 67], params(10))))
            with killed([start_echo(port_of(client), "large", num_blocks=200)]):
                await until(client, 2)
                await require_whole(begun, 800)
                client.abort(51)
                assert (await rest(fits))[1].finish == "abort"
                left = await begin(client, 2, 2000)
                await client.drain("large", grace_s=0.05)
                for _, stream in left.values():
                    _, last = await rest(stream)
                    assert last.finish == "error"
                    assert "the KV of 2002 tokens; the largest pool of the engines here has 320" in str(last.error)


async def test_an_engine_that_is_back_with_a_smaller_pool_leaves_what_it_cannot_hold_to_others() -> None:
    """As if the small one had another name: what needs more waits for an engine that has it."""
    async with front() as client:
        large = start_echo(port_of(client), "e", num_blocks=200)
        with killed([large]):
            await until(client, 1)
            begun = await begin(client, 2, 800)
            short = client.submit(Submit(50, [65, 66, 67], params(200)))
            os.kill(large.pid, signal.SIGKILL)
            await until(client, 0)
        with killed([small := start_echo(port_of(client), "e", num_blocks=20)]):
            await until(client, 1)
            assert (await rest(short))[1].finish == "length"
            assert sorted(client._home) == [1, 2]
            assert not engine_of(client, small).entries
            with killed([start_echo(port_of(client), "e2", num_blocks=200)]):
                await until(client, 2)
                await require_whole(begun, 800)


async def test_an_engine_that_is_drained_stays_if_the_others_end_meanwhile() -> None:
    async with joined(2) as (client, engines):
        begun = await begin(client, 4, 1500)
        drain = asyncio.create_task(client.drain("e0", grace_s=0.5))
        await asyncio.sleep(0.05)
        os.kill(engines[1].pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="'e0' is the only one that takes requests"):
            await drain
        assert engine_of(client, engines[0]).takes_requests
        assert len(engine_of(client, engines[0]).entries) == 4, "with those of the engine that ended"
        await require_whole(begun, 1500)
        with killed([start_echo(port_of(client), "e1")]):
            await until(client, 2)
            await client.drain("e0", grace_s=0.05)
            assert [each.engine.name for each in client.replicas] == ["e1"]


async def test_what_a_replica_that_was_removed_knew_of_a_request_is_known_no_more() -> None:
    async with joined(2) as (client, _):
        await rest(client.submit(Submit(7, [70, 71], params(5))))
        await client.drain(client._was_at[7].engine.name, grace_s=0.05)
        assert await client.explain(7) is None


async def test_a_replica_of_this_machine_is_drained_and_its_process_ends() -> None:
    async with joined(1, own=2) as (client, _):
        begun = await begin(client, 9, 900)
        pid = client.replicas[0].engine.pid
        await client.drain("0", grace_s=0.05)
        assert [each.engine.name for each in client.replicas] == ["1", "e0"]
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)
        await require_whole(begun, 900)


@pytest.mark.parametrize("again", range(2))
async def test_engines_that_end_together_are_no_requests_fault(again: int) -> None:
    async with joined(5) as (client, engines):
        begun = await begin(client, 10, 300)
        for each in engines[:4]:
            os.kill(each.pid, signal.SIGKILL)
        await require_whole(begun, 300)


async def test_a_request_that_ends_engines_fails_alone_after_few_of_them() -> None:
    """It is one of eight in a batch: at most 2 + log2(8) engines end by it, here each is replaced at once."""
    async with front() as client:
        processes = [start_echo(port_of(client), f"e{at}", "poison") for at in range(4)]
        with killed(processes):
            await until(client, 4)
            begun = await begin(client, 31, 1500)
            bad = asyncio.create_task(rest(client.submit(Submit(90, [65, echo_child.POISON], params(5)))))
            num_ended = 0
            while not bad.done():
                await asyncio.sleep(0.005)
                for at, each in enumerate(processes):
                    if each.process.poll() is not None:
                        num_ended += 1
                        each.sock.close()
                        processes[at] = start_echo(port_of(client), f"e{at}", "poison")
            num_ended += sum(each.process.poll() is not None for each in processes)
            _, last = await bad
            assert (last.finish, last.error) == ("error", "this request ended the engine process")
            assert 1 < num_ended <= 5
            await require_whole(begun, 1500)


async def test_settings_that_were_changed_reach_engines_that_join_later() -> None:
    async with joined(1) as (client, _):
        await client.reconfigure({"target_itl_ms": 40.0})
        with killed([start_echo(port_of(client), "late")]):
            await until(client, 2)
            for each in client.replicas:
                reply = await client._question(each.engine, lambda ticket: Reconfigure(ticket, {}))
                assert isinstance(reply, Reconfigured)
                assert reply.settings["target_itl_ms"] == 40.0, each.engine.name


async def test_an_engine_that_left_and_holds_nothing_does_not_decide_who_may_join() -> None:
    async with front() as client:
        with killed([start_echo(port_of(client), "e", max_len=4096)]) as processes:
            await until(client, 1)
            os.kill(processes[0].pid, signal.SIGTERM)
            processes[0].process.wait()
            await until(client, 0)
            assert [each.engine.name for each in client.replicas] == ["e"]
            processes.append(start_echo(port_of(client), "other", max_len=8192))
            await until(client, 1, 5.0)
            assert [each.engine.name for each in client.replicas] == ["other"], "what no request can go to is forgotten"
            assert client.info.max_model_len == 8192


async def test_one_front_under_two_names_is_joined_once() -> None:
    async with front() as client:
        port = port_of(client)
        with killed([start_echo(port, "e", join=f"127.0.0.1:{port},localhost:{port}")]) as (process,):
            await until(client, 1)
            await asyncio.sleep(1.5)
            assert client.num_restarts == 0
            os.kill(process.pid, signal.SIGTERM)
            assert process.process.wait() == 0
