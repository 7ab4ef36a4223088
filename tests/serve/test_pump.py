"""The pump writes to a connection what ASGI would send, byte for byte, and leaves nothing behind when a client goes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator

import pytest

from echo_engine import EchoEngine
from headway.config import ServerConfig
from headway.engine.client import EngineInfo, Output, RequestTiming, Submit
from headway.engine.messages import Abort, Command
from headway.engine.streams import StreamClient
from headway.serve.formats import ChatFormat, CompletionFormat, Format
from headway.serve.generate import Generation, Prompt
from headway.serve.pump import Pump
from headway.serve.service import ServedModel, Service
from headway.serve.sse import Events, EventWriter
from headway.text.chat import ChatTemplate
from headway.values.params import SamplingParams
from headway.values.plan import Emission, TokenLogprob
from raw_http import Raw, head
from serve_harness import Harness, byte_tokenizer, serving

TEXT = "stop é日\U0001f600 or not: a\nb STOP ".encode() + b"\xe6cut \xf0\x9f\xff"  # ends with halves of characters
TIMING = RequestTiming(0.001, 0.002, 0.003)


class ScriptedClient(StreamClient):
    """Streams that are fed by hand; keeps what it was told."""

    def __init__(self, max_buffer_bytes: int = 1024 * 1024) -> None:
        super().__init__(max_buffer_bytes=max_buffer_bytes)
        self._info = EngineInfo("m", 10**6, 300, 16, 10**6, 64, (0,))
        self.sent: list[Command] = []

    def _send(self, command: Command) -> None:
        self.sent.append(command)

    def feed(self, *messages: Emission[Output] | Output) -> None:
        self._dispatch(messages)


class Collected:
    """A body that keeps what is written to it; it has room for so many writes."""

    def __init__(self, pump: Pump, room: int = 10**9) -> None:
        self.pump = pump
        self.room = room
        self.chunks: list[bytes] = []

    @property
    def flow(self) -> Collected:
        return self

    @property
    def write_paused(self) -> bool:
        return not self.has_room

    @property
    def has_room(self) -> bool:
        return self.room > 0

    def send(self, chunk: bytes) -> None:
        """A chunk as it goes over a connection."""
        num_bytes, _, rest = chunk.partition(b"\r\n")
        assert rest[-2:] == b"\r\n"
        assert int(num_bytes, 16) == len(rest) - 2
        self.write([rest[:-2]])

    def write(self, parts: list[bytes]) -> None:
        assert parts
        assert all(parts)
        assert self.room > 0
        self.room -= 1
        self.chunks += parts


class Scene:
    """One streamed request and the service around it."""

    def __init__(self, params: SamplingParams, n: int, make: Callable[[Generation], Format], has_usage: bool) -> None:
        self.client = ScriptedClient()
        self.service = Service(ServerConfig(port=0))
        self.service.watch(self.client)
        model = ServedModel("m", self.client, byte_tokenizer(), ChatTemplate(""), 1)
        self.run = Generation(self.service, model)
        self.run.__enter__()
        self.run.submit([Prompt([1, 2, 3], params)], n=n)
        self.events = Events(self.run, make(self.run), has_usage=has_usage)

    async def asked(self) -> list[bytes]:
        """Every event, waited for one by one."""
        chunks: list[bytes] = []
        while (chunk := await self.events.next(self.service.pump)) is not None:
            chunks.append(chunk)
        return chunks

    async def pumped(self, room: int) -> list[bytes]:
        """The first event as it is waited for, the rest as they are written; there is room for so many at a time."""
        chunks: list[bytes] = []
        while (chunk := await self.events.next(self.service.pump)) is not None:
            chunks.append(chunk)
            body = Collected(self.service.pump, room)
            await self.service.pump.follow(self.run, EventWriter(self.events, body).take)  # type: ignore[arg-type]
            chunks += body.chunks
        return chunks


def frames(rng: random.Random, num_rows: int, num_logprobs: int | None) -> Iterator[Emission[Output]]:
    """Steps in which some rows get some tokens, until all rows have ended; row i is answer i."""
    data = [TEXT * 4 for _ in range(num_rows)]
    at, is_open = [0] * num_rows, set(range(1, num_rows + 1))
    while is_open:
        ids: list[int] = []
        logprobs: dict[int, list[TokenLogprob]] = {}
        ended: list[Output] = []
        for id in sorted(is_open):
            taken = rng.choice((0, 1, 1, 1, 2, 5))
            ids += [id] * taken
            if num_logprobs is not None and taken:
                top = tuple((66 + i, -1.0 - i) for i in range(num_logprobs))
                logprobs[id] = [TokenLogprob(-0.25 * id, top)] * taken
            if at[id - 1] + taken > 40 + 7 * id:
                ended.append(Output(id, finish=rng.choice(("length", "stop")), cached_tokens=2, timing=TIMING))
                is_open.discard(id)
        tokens: list[int] = []
        for id in ids:
            tokens.append(1 + data[id - 1][at[id - 1]])
            at[id - 1] += 1
        yield Emission(ids, tokens, ended, logprobs)


def chat(has_usage: bool, logprobs: bool, counts: bool) -> Callable[[Generation], Format]:
    return lambda run: ChatFormat(
        "i", 1, "m", "f", has_usage, logprobs, None, ["w"], run.usage_so_far if counts else None
    )


def completion(has_usage: bool, logprobs: bool, counts: bool) -> Callable[[Generation], Format]:
    top = 2 if logprobs else None
    return lambda run: CompletionFormat("i", 1, "m", "f", has_usage, top, "t", [], run.usage_so_far if counts else None)


@pytest.mark.parametrize("seed", range(120))
def test_pumped_events_are_those_that_are_waited_for(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.choice((1, 1, 3))
    has_usage, logprobs = rng.random() < 0.6, rng.random() < 0.3
    stops = rng.choice(((), (), (), (), ("STOP",), ("a\nb",), ("\U0001f600 or", "never"), ("日",)))
    params = SamplingParams(max_tokens=1000, stop=stops, logprobs=2 if logprobs else None)
    make = rng.choice((chat, completion))(has_usage, logprobs, has_usage and rng.random() < 0.3)
    fed = list(frames(rng, n, 2 if logprobs else None))
    at_once = rng.choice((1, 1, 3))  # frames that come before the event loop has its turn
    outcome = {}
    for how, room in (("asked", 0), ("pumped", 10**9), ("full", 2)):

        async def main(how: str = how, room: int = room) -> tuple[list[bytes], list[Command]]:
            scene = Scene(params, n, make, has_usage)
            reading = asyncio.create_task(scene.asked() if how == "asked" else scene.pumped(room))
            for at in range(0, len(fed), at_once):
                for _ in range(3):
                    await asyncio.sleep(0)
                scene.client.feed(*fed[at : at + at_once])
            chunks = await asyncio.wait_for(reading, 10)
            scene.run.__exit__(None, None, None)
            assert scene.client.num_open == 0
            return chunks, [command for command in scene.client.sent if not isinstance(command, Submit)]

        outcome[how] = asyncio.run(main())
    assert outcome["pumped"] == outcome["asked"]
    assert b"".join(outcome["full"][0]) == b"".join(outcome["asked"][0])
    assert outcome["asked"][0][-1].endswith(b"data: [DONE]\n\n")


async def test_a_step_is_one_write_and_wakes_no_task() -> None:
    scene = Scene(SamplingParams(max_tokens=1000), 3, completion(False, False, False), has_usage=False)
    scene.client.feed(Emission([1, 2, 3], [66, 67, 68]))
    for _ in range(3):
        assert await scene.events.next(scene.service.pump) is not None
    body, taken = Collected(scene.service.pump), []

    writer = EventWriter(scene.events, body)  # type: ignore[arg-type]

    def write() -> bool:
        taken.append(asyncio.current_task())
        return writer.take()

    following = asyncio.create_task(scene.service.pump.follow(scene.run, write))
    await asyncio.sleep(0)
    for _ in range(5):
        scene.client.feed(Emission([1, 2, 3, 1], [66, 67, 68, 69]))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (len(body.chunks), 10**9 - body.room) == (15, 5)
    assert taken[1:] == [None] * 5, "it ran in a task"
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    scene.client.feed(Emission([1], [66]))
    await asyncio.sleep(0)
    assert len(body.chunks) == 15, "nothing is taken for a client that has left"
    scene.run.__exit__(None, None, None)
    assert [command.id for command in scene.client.sent if isinstance(command, Abort)] == [1, 2, 3]


async def test_connections_are_written_to_when_all_have_taken_and_a_closed_one_costs_the_others_nothing() -> None:
    params, told = SamplingParams(max_tokens=1000), list[str]()
    scenes = [Scene(params, 1, completion(False, False, False), has_usage=False) for _ in range(3)]
    pump = scenes[0].service.pump

    async def begin(at: int) -> asyncio.Task[None]:
        scene, body = scenes[at], Collected(pump)
        scene.client.feed(Emission([1], [66]))
        await scene.events.next(pump)
        writer = EventWriter(scene.events, body)  # type: ignore[arg-type]

        def send(chunk: bytes) -> None:
            told.append(f"{at} writes")
            if at == 1:
                raise RuntimeError("closed")

        writer._send = send

        def take() -> bool:
            told.append(f"{at} takes")
            return writer.take()

        return asyncio.create_task(pump.follow(scene.run, take))

    tasks = [await begin(at) for at in range(3)]
    await asyncio.sleep(0)
    told.clear()
    for scene in scenes:
        scene.client.feed(Emission([1], [67]))
    await asyncio.sleep(0)
    assert told == [f"{at} {what}" for what in ("takes", "writes") for at in range(3)]
    assert not pump.sends
    assert not pump.chunks
    for task, scene in zip(tasks, scenes, strict=True):
        task.cancel()
        scene.run.__exit__(None, None, None)


async def test_a_follower_that_is_cancelled_and_done_in_one_turn_hinders_no_other() -> None:
    pump, runs = Pump(), [Scene(SamplingParams(), 1, chat(False, False, False), has_usage=False).run for _ in range(2)]
    calls: list[int] = []

    def follow(at: int) -> asyncio.Task[None]:
        def take() -> bool:
            calls.append(at)
            return 2 < len(calls) < 5

        return asyncio.create_task(pump.follow(runs[at], take))

    tasks = [follow(at) for at in range(2)]
    await asyncio.sleep(0)
    notes = [run.on_arrival for run in runs]
    for note in notes:
        assert note is not None
        note()
    tasks[0].cancel()  # behind the turn, which is before its task's
    first, second = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert (type(first), second, calls) == (asyncio.CancelledError, None, [0, 1, 0, 1])
    third = follow(0)
    await asyncio.sleep(0)
    calls.clear()
    third.cancel()
    assert runs[0].on_arrival is not None
    runs[0].on_arrival()  # in the same turn, so that the task ends before anything is taken
    await asyncio.gather(third, return_exceptions=True)
    assert calls == []


async def test_what_one_follower_raises_is_its_own() -> None:
    pump, runs = Pump(), [Scene(SamplingParams(), 1, chat(False, False, False), has_usage=False).run for _ in range(2)]
    calls: list[str] = []

    def fail() -> bool:
        calls.append("fail")
        if len(calls) > 2:
            raise ValueError("out of luck")
        return False

    def go_on() -> bool:
        calls.append("go on")
        return len(calls) > 2

    tasks = [asyncio.create_task(pump.follow(run, take)) for run, take in zip(runs, (fail, go_on), strict=True)]
    await asyncio.sleep(0)
    for run in runs:
        assert run.on_arrival is not None
        run.on_arrival()
    first, second = await asyncio.gather(*tasks, return_exceptions=True)
    assert (str(first), second) == ("out of luck", None)
    assert [run.on_arrival for run in runs] == [None, None]


def test_a_connection_is_of_use_after_a_stream(server: Harness) -> None:
    ask = json.dumps({"prompt": "abc", "max_tokens": 40, "stream": True, "n": 3, "temperature": 0}).encode()
    with Raw(server.url) as raw:
        for _ in range(3):
            raw.send(head("/v1/completions", len(ask)) + ask)
            status, headers, body = raw.answer()
            assert (status, headers["transfer-encoding"]) == (200, "chunked")
            texts = ["", "", ""]
            for line in body.split(b"\n\n")[:-2]:
                (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                texts[choice["index"]] += choice["text"]
            assert len(set(texts)) == 1
            assert texts[0] == ("abc" * 14)[:40]
            assert body.endswith(b"data: [DONE]\n\n")


def test_requests_in_a_pipeline_are_answered_in_their_order(server: Harness) -> None:
    asks = [
        json.dumps({"prompt": text, "max_tokens": 30, "stream": True, "temperature": 0}).encode()
        for text in ("a", "b", "c")
    ]
    with Raw(server.url) as raw:
        raw.send(b"".join(head("/v1/completions", len(ask)) + ask for ask in asks))
        for letter in ("a", "b", "c"):
            status, _, body = raw.answer()
            said = [json.loads(line[6:])["choices"][0]["text"] for line in body.split(b"\n\n")[:-2]]
            assert (status, "".join(said)) == (200, letter * 30)


def test_a_client_that_leaves_a_stream_ends_its_request() -> None:
    ask = json.dumps({"prompt": "abc", "max_tokens": 400, "stream": True}).encode()
    with serving(EchoEngine(hold_after=20)) as server:
        with Raw(server.url) as raw:
            raw.send(head("/v1/completions", len(ask)) + ask)
            seen = b""
            while b"data: " not in seen:
                seen += raw.sock.recv(65536)
        server.wait_idle()
        assert server.engine.aborts == [(1, "abort")]
