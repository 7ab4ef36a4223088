"""Random faults while KV passes from one engine to another: nothing leaks, no flipped bit gets in, all requests end.

    python tools/fuzz_fetch.py [--schedules 100000] [--seed 0] [--processes 2]

A schedule is its seed; four share two engines. A request is computed on one engine and goes on in another; messages
between them are lost, doubled, swapped, cut and bit-flipped, either engine is killed in any state, requests are
aborted, leases run out. Engines, scheduler, ledger, mover, protocol and verification are those of production over the
null executor and a virtual clock; only sockets and threads are not there. After each four, one second after the last
lease, every block of both pools must be free, and what was written must be what was read. Exits 1 if one failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headway.cluster.fetch import Fetch, unpack_fetch
from headway.cluster.fetch_peers import FetchPeers
from headway.cluster.fetch_server import FetchServer
from headway.cluster.links import LinkBroken
from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.engine.arrivals import ArrivedBlock
from headway.engine.block_log import BlockLog
from headway.engine.client import EngineInfo, Output, Submit
from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.engine.executor import Capacity
from headway.engine.metrics import EngineMetrics
from headway.engine.mover import LOAD_LEASE_S, BlockMover, Hold, wanted_keys
from headway.engine.null import NullExecutor
from headway.engine.tier.record import HEADER_BYTES, BlockHeader, unpack_header
from headway.values.limits import Limits
from headway.values.params import SamplingParams
from headway.values.states import State

BLOCK, NUM_BLOCKS, SIZE = 4, 40, 32
AT_A_TIME = 4  # schedules that share two engines, and what befalls these
IDENTITY = bytes(32)
MUST_HAPPEN = (
    *("lost", "doubled", "swapped", "flipped", "cut", "request flipped", "lease ended", "aborted", "let go", "whole"),
    *(f"prefill killed {when}" for when in ("before the fetch", "in the fetch", "after the fetch")),
    *(f"decode killed while {state}" for state in ("loading", "waiting", "running")),
)


class KeyedNull(NullExecutor):
    """A block reads as the key it is indexed by, so that a wrong block shows."""

    def __init__(self, ledger: KVLedger) -> None:
        super().__init__(Capacity(NUM_BLOCKS, BLOCK, 4))
        self._key_of = ledger.index.key_of
        self.written: dict[int, bytes] = {}

    def read_block(self, block: int, into: memoryview) -> None:
        into[:] = self._key_of.get(block, bytes(SIZE))

    def write_block(self, block: int, data: memoryview, tokens: Sequence[int], start: int) -> None:
        self.written[block] = bytes(data)


class Side:
    """One engine of the two."""

    def __init__(self, clock: VirtualClock, *, fetches: bool) -> None:
        metrics, blocks = EngineMetrics(clock), BlockLog()
        self.ledger = KVLedger(NUM_BLOCKS, BLOCK, told=blocks)
        self.executor = KeyedNull(self.ledger)
        self.scheduler = Scheduler(self.ledger, Limits(rows=4, tokens=64), Policy(), sink=metrics)
        self.peers = DirectPeers() if fetches else None
        self.mover = BlockMover(self.scheduler, self.executor, peers=self.peers)
        blocks.also = self.mover.told
        info = EngineInfo("null", 200, 100, BLOCK, NUM_BLOCKS, 4)
        self.engine = Engine(self.scheduler, self.executor, info, metrics, clock, max_waiting=64, mover=self.mover)
        self.tokens: Counter[int] = Counter()
        self.ended: dict[int, Output] = {}

    def step(self) -> None:
        emission = self.engine.step()
        self.tokens.update(emission.ids)
        for output in emission.finished:
            assert output.id not in self.ended, "a request ended twice"
            self.ended[output.id] = output

    def is_clean(self) -> bool:
        mover = self.mover
        is_empty = not (self.scheduler.state.live or mover._loads or mover._holds or mover._kept or mover._kept_by)
        return is_empty and self.ledger.num_free == NUM_BLOCKS and not any(self.ledger.pool.refs)


def copy_of(arrival: ArrivedBlock) -> ArrivedBlock:
    """The same once more; no two arrivals share memory."""
    return arrival if arrival.data is None else arrival._replace(data=memoryview(bytearray(arrival.data)))


class DirectPeers(FetchPeers):
    """The fetching end without its thread: the schedule says when what happens."""

    def __init__(self) -> None:
        super().__init__(IDENTITY, SIZE)
        self.asked: list[tuple[int, list[bytes]]] = []

    def load(self, ticket: int, keys: Sequence[bytes], at: str = "") -> None:
        self.asked.append((ticket, list(keys)))

    def fetch(self, link: FaultyLink, ticket: int, keys: Sequence[bytes], *, ends: bool) -> None:
        with suppress(LinkBroken):
            self._fetch(link, ticket, keys)
        if ends:
            self._arrivals.append(ArrivedBlock(ticket, len(keys), None))


class DirectServer(FetchServer):
    """The serving end without its threads."""

    def __init__(self, blocks: Serving) -> None:
        self._blocks, self._identity, self._block_bytes = blocks, IDENTITY, SIZE

    def answer(self, link: FaultyLink, fetch: Fetch) -> None:
        self._answer(link, fetch)


class Serving:
    """What the serving engine's threads may call, at a time when the engine may have gone on meanwhile."""

    def __init__(self, side: Side, clock: VirtualClock, happens: dict[int, str], world: World) -> None:
        self._side, self._clock, self._happens, self._world = side, clock, happens, world

    def ask(self, keys: Sequence[bytes], lease_s: float, timeout_s: float) -> Hold | None:
        mover = self._side.mover
        kept = mover._kept_by.get(keys[-1])
        if kept is not None and kept.is_valid:
            return mover.ask(keys, lease_s, timeout_s)
        return mover.hold(keys, lease_s, self._clock.now())

    def copy_out(self, hold: Hold, index: int, into: memoryview) -> bool:
        self._world.during(self._happens.pop(index, ""))
        return self._side.mover.copy_out(hold, index, into)

    def done(self, hold: Hold) -> None:
        self._side.mover.done(hold)


class FaultyLink:
    """Carries records from one to the other, with the faults of a schedule."""

    def __init__(self, world: World, faults: Sequence[str]) -> None:
        self._world = world
        self._faults = faults
        self._slot = memoryview(bytearray(SIZE))
        self._messages: list[bytes] = []
        self.sock: Any = None

    def limit(self, seconds: float, quiet_s: float = 0.0) -> None:
        pass

    def ask(self, fetch: bytes) -> None:
        raw = self._world.maybe_flip(fetch, "request flipped") if "request" in self._faults else fetch
        asked = unpack_fetch(raw)
        if asked is None:
            raise LinkBroken("the request is not whole")
        assert raw == fetch, "a flipped bit in a request got through"
        self._world.serve(self, asked)
        self._spoil()

    def hear(self, into: memoryview) -> None:
        raise NotImplementedError  # `ask` hands the request over

    def close(self) -> None:
        pass

    def slot(self) -> memoryview:
        return self._slot

    def send(self, header: bytes) -> None:
        self._messages.append(header + bytes(self._slot))

    def finish(self, end: bytes) -> None:
        self._messages.append(end)

    def _spoil(self) -> None:
        messages, rng, seen = self._messages, self._world.rng, self._world.seen
        for fault in self._faults:
            at = rng.randrange(len(messages)) if messages else 0
            if not messages or not messages[at] or fault == "request":
                continue
            if fault == "lost":
                del messages[at]
            elif fault == "doubled":
                messages.insert(rng.randrange(len(messages) + 1), messages[at])
            elif fault == "swapped":
                rng.shuffle(messages)
            elif fault == "flipped":
                self._world.num_flipped += 1
                messages[at] = self._world.maybe_flip(messages[at], "flipped")
                continue
            elif fault == "cut":
                messages[at] = messages[at][: rng.randrange(len(messages[at]))]
            seen[fault] += 1
        messages.reverse()

    def receive(self, into: memoryview) -> BlockHeader | None:
        """As a link over a socket does it."""
        if not self._messages:
            raise LinkBroken("the peer has closed the connection")
        raw = self._messages.pop()
        header = unpack_header(raw[:HEADER_BYTES])
        if header is None:
            raise LinkBroken("the peer sent a header that is not whole")
        if not header.num_bytes:
            return None
        if header.num_bytes != len(into) or len(raw) != HEADER_BYTES + SIZE:
            raise LinkBroken("a block of another length")
        into[:] = raw[HEADER_BYTES:]
        return header


@dataclass(eq=False, slots=True)
class Loading:
    """A request whose KV is on its way, as it was before anything came."""

    req: Request
    table: list[int]
    first: int
    num_tokens: int
    wanted: list[bytes]
    is_sound: bool = False  # nothing was done to its messages


class World:
    """Two engines that many schedules use one after the other; a killed one is made anew."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.prefill, self.decode = Side(self.clock, fetches=False), Side(self.clock, fetches=True)
        self.seen: Counter[str] = Counter()
        self.num_flipped = 0
        self.id = self.current = 0
        self.prompts: dict[int, list[int]] = {}
        self.rng = random.Random(0)

    def maybe_flip(self, raw: bytes, what: str) -> bytes:
        bit = self.rng.randrange(8 * len(raw))
        broken = bytearray(raw)
        broken[bit // 8] ^= 1 << bit % 8
        self.seen[what] += 1
        return bytes(broken)

    def kill_prefill(self, when: str) -> None:
        self.seen[f"prefill killed {when}"] += 1
        self.prefill = Side(self.clock, fetches=False)

    def kill_decode(self, state: str) -> None:
        self.seen[f"decode killed while {state}"] += 1
        self.decode = Side(self.clock, fetches=True)

    def during(self, what: str) -> None:
        """Something happens on the serving engine between two blocks."""
        if what == "kill":
            raise LinkBroken("killed")
        if what == "lease":
            self.seen["lease ended"] += 1
            self.clock.advance(70.0)
            self.prefill.step()
        elif what == "release":
            self.prefill.engine.abort(self.current)

    def serve(self, link: FaultyLink, fetch: Fetch) -> None:
        rng = self.rng
        if rng.random() < 0.03:
            self.kill_prefill("before the fetch")
        what = rng.choice(("kill", "lease", "release")) if rng.random() < 0.12 else ""
        happens = {rng.randrange(max(1, len(fetch.keys))): what} if what else {}
        try:
            DirectServer(Serving(self.prefill, self.clock, happens, self)).answer(link, fetch)
        except LinkBroken:
            self.kill_prefill("in the fetch")
        if rng.random() < 0.03:
            self.kill_prefill("after the fetch")

    # Some schedules at a time.

    def run(self, seeds: Sequence[int]) -> None:
        began = {self._begin(random.Random(seed)): random.Random(seed + (1 << 40)) for seed in seeds}
        while not all(id in self.prefill.ended for id in began):
            self.prefill.step()
        for id, rng in began.items():
            self._go_on(id, rng)
        loads = [load for id, rng in began.items() if (load := self._transfer(id, rng)) is not None]
        if self.decode.peers is not None:
            self.decode.peers.asked.clear()
        self.decode.step()
        self._verify(loads)
        for id, rng in began.items():
            self._finish(id, rng)
        self._check(list(began))

    def _begin(self, rng: random.Random) -> int:
        self.id += 1
        self.prompts[self.id] = prompt = [rng.randrange(100) for _ in range(rng.randrange(1, 21))]
        hold_s = rng.choice((2.0, 5.0, 30.0))
        self.prefill.engine.add(Submit(self.id, prompt, SamplingParams(max_tokens=1), hold_s=hold_s))
        return self.id

    def _go_on(self, id: int, rng: random.Random) -> None:
        """The second engine gets the request, perhaps when the first one keeps nothing any more."""
        if rng.random() < 0.02:
            self.clock.advance(5.1)
            self.prefill.step()
            self.seen["lease ended"] += 1
        prompt = self.prompts.pop(id)
        more = {"num_prompt": len(prompt), "is_resumed": True, "fetch_from": "x"}
        params = SamplingParams(max_tokens=rng.randrange(2, 4))
        self.decode.engine.add(Submit(id, [*prompt, 1], params, **more))  # type: ignore[arg-type]

    def _transfer(self, id: int, rng: random.Random) -> Loading | None:
        """Fetch for one request; what may be written for it."""
        self.rng, self.current = rng, id
        req, peers = self.decode.scheduler.state.live.get(id), self.decode.peers
        if req is None or req.state is not State.LOADING or peers is None:
            return None
        tickets = {ticket for ticket, load in self.decode.mover._loads.items() if load.req is req}
        ticket, keys = next((ticket, keys) for ticket, keys in peers.asked if ticket in tickets)
        loading = Loading(req, list(req.table), req.published, len(req.tokens) - 1, wanted_keys(req, BLOCK))
        faults = [rng.choice(("lost", "doubled", "swapped", "flipped", "cut", "request")) for _ in range(3)]
        faults = faults[: rng.choice((0, 1, 1, 2, 3))]
        loading.is_sound = not faults
        peers.fetch(FaultyLink(self, faults), ticket, keys, ends=rng.random() < 0.9)
        if rng.random() < 0.1:
            peers._arrivals += [copy_of(each) for each in list(peers._arrivals)[: rng.randrange(3)]]
        if rng.random() < 0.05:
            rng.shuffle(peers._arrivals)
        if rng.random() < 0.02:
            self.kill_decode("loading")
        elif rng.random() < 0.03:
            self.decode.mover.turn(self.clock.now(), is_idle=True)
            if req.state.value == "waiting":
                self.kill_decode("waiting")
        return loading

    def _verify(self, loads: Sequence[Loading]) -> None:
        """What was written, and where."""
        place = {block: (load, at) for load in loads for at, block in enumerate(load.table) if at >= load.first}
        for block, data in self.decode.executor.written.items():
            assert block in place, "a block was written that is not its own"
            load, at = place[block]
            is_tail = (at + 1) * BLOCK > load.num_tokens
            assert data == (bytes(SIZE) if is_tail else load.wanted[at]), "a wrong block was written"
        self.decode.executor.written.clear()
        self.seen["whole"] += sum(load.is_sound and load.req.num_cached == load.num_tokens for load in loads)

    def _finish(self, id: int, rng: random.Random) -> None:
        decode = self.decode
        live = decode.scheduler.state.live.get(id)
        if live is not None and rng.random() < 0.1:
            self.seen["aborted"] += 1
            output = decode.engine.abort(id)
            assert output is not None
            decode.ended[id] = output
        elif live is not None and rng.random() < 0.03:
            self.kill_decode(live.state.value)
        if rng.random() < 0.8:
            self.seen["let go"] += 1
            self.prefill.engine.abort(id)

    def _check(self, ids: Sequence[int]) -> None:
        """Everything ends; one second after the last lease all blocks are back."""
        decode, left = self.decode, 40
        while any(id in decode.scheduler.state.live for id in ids) and left:
            decode.step()
            left -= 1
            if decode.scheduler.state.leases:
                self.clock.advance(LOAD_LEASE_S / 4)
        assert left, "a request does not end"
        decode.executor.written.clear()
        self.clock.advance(61.0)
        for side in (self.prefill, decode):
            side.step()
            assert side.is_clean(), "blocks leak"
            side.ended.clear()


def run_many(job: tuple[int, int]) -> tuple[Counter[str], int, list[str]]:
    """So many schedules from a seed on: what happened, bits flipped, failures."""
    first, count = job
    world, failed = World(), []
    for seed in range(first, first + count, AT_A_TIME):
        try:
            world.run(range(seed, min(seed + AT_A_TIME, first + count)))
        except Exception as error:
            failed.append(f"seed {seed}: {error!r}")
            seen, num_flipped = world.seen, world.num_flipped
            world = World()
            world.seen, world.num_flipped = seen, num_flipped
    return world.seen, world.num_flipped, failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    began, each = time.perf_counter(), max(1, min(2_000, args.schedules // args.processes or 1))
    jobs = [(s, min(each, args.seed + args.schedules - s)) for s in range(args.seed, args.seed + args.schedules, each)]
    seen: Counter[str] = Counter()
    num_flipped, failed = 0, list[str]()
    if args.processes == 1:
        results = map(run_many, jobs)
        for one, flipped, faults in results:
            seen, num_flipped, failed = seen + one, num_flipped + flipped, failed + faults
    else:
        with multiprocessing.get_context("fork").Pool(args.processes) as pool:
            for one, flipped, faults in pool.imap_unordered(run_many, jobs):
                seen, num_flipped, failed = seen + one, num_flipped + flipped, failed + faults
    seconds = time.perf_counter() - began
    for line in failed[:10]:
        print(f"{line}: python tools/fuzz_fetch.py --seed {line.split()[1].rstrip(':')} --schedules {AT_A_TIME}")
    print(", ".join(f"{count} {what}" for what, count in sorted(seen.items())))
    missing = [what for what in MUST_HAPPEN if not seen[what]] if args.schedules >= 1000 else []
    if missing:
        print("never happened:", ", ".join(missing))
    flips = num_flipped + seen["request flipped"]
    print(f"{len(failed)} of {args.schedules} schedules failed, {flips} flipped bits, {seconds:.1f} s")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
