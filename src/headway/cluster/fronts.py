"""The engine's end of several connections: fronts share one engine, and none sees another one's requests.

    front A  ids 1, 2 ──┐   ids of the engine   ┌── tokens of 1, 2
    front B  ids 1, 2 ──┴──▶   1, 2, 3, 4   ────┴── tokens of 1, 2          tickets likewise

Commands come from the thread that reads the connections (`dial`); all else here belongs to the engine's thread. A front
that is gone has its requests aborted: no client is left there. One that does not read is dropped, so that no front
holds up the engine.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

from headway.engine.client import EngineInfo, Output, Submit
from headway.engine.messages import (
    Abort,
    AdaptersNow,
    BlockNews,
    Command,
    Dismiss,
    Explain,
    Fatal,
    GetStats,
    Joining,
    Leaving,
    LoadAdapter,
    LookUp,
    Message,
    Ready,
    Reconfigure,
    Reply,
    Shutdown,
    UnloadAdapter,
    WatchBlocks,
)
from headway.engine.published import Published
from headway.engine.wire import encode
from headway.values.plan import Emission, TokenLogprob

log = logging.getLogger(__name__)

_REMEMBERED = 4096  # requests that a front may ask about after their end
_GROUP_BITS = 20  # of a front's number, in the groups of its requests
_Asked = TypeVar("_Asked", GetStats, Reconfigure, Explain, LookUp, LoadAdapter, UnloadAdapter)


class Front:
    """One connection. `ids` are its open requests: its own id -> the engine's."""

    def __init__(self, number: int, where: str, write: Callable[[bytes], None]) -> None:
        self.number = number
        self.where = where
        self.write = write  # safe in any thread; drops the connection if too much waits
        self.ids: dict[int, int] = {}
        self.last_id = 0  # of the requests that the engine knows
        self.watches = False


@dataclass(slots=True)
class _Share:
    """What one front gets of a step."""

    ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[Output] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)


class FrontsPort:
    """A `Port` for `engine.child`. Every output reaches the front whose request it is, or none if that is gone."""

    def __init__(self, name: str, instance: str, pid: int, on_ready: Callable[[], None]) -> None:
        self._name, self._instance, self._pid = name, instance, pid
        self._on_ready = on_ready
        self._inbox: queue.SimpleQueue[tuple[Front | None, Command | bool]] = queue.SimpleQueue()
        self._fronts: dict[int, Front] = {}
        self._ids, self._tickets = count(1), count(1)
        self._homes: dict[int, tuple[Front, int]] = {}  # the engine's id -> front, its own id
        self._ended: dict[tuple[int, int], int] = {}  # front, its own id -> the engine's; of the last ones
        self._asked: dict[int, tuple[Front, int]] = {}  # ticket -> front, its own ticket
        self._askers: deque[Front] = deque()  # that wait for all blocks
        self._info: EngineInfo | None = None
        self._published: Published | None = None
        self.fatal: Fatal | None = None  # why the engine could not start or go on
        self.is_ending = False  # as planned: no front is to be dialled again

    # For the thread that reads the connections.

    def attach(self, front: Front) -> None:
        """A front let this engine in."""
        self._inbox.put((front, True))

    def put(self, front: Front, command: Command) -> None:
        self._inbox.put((front, command))

    def detach(self, front: Front) -> None:
        """Its connection is over."""
        self._inbox.put((front, False))

    def stop(self) -> None:
        """End the engine, as planned; also from within a signal handler."""
        self._inbox.put((None, Shutdown()))

    def wake(self) -> None:
        """Let the `receive` of now, or the next one, return at once; for any thread."""
        self._inbox.put((None, False))

    # For the engine.

    def receive(self, timeout_s: float | None) -> list[Command]:
        commands: list[Command] = []
        try:
            if timeout_s != 0:
                self._take(*self._inbox.get(timeout=timeout_s), commands)
            while True:
                self._take(*self._inbox.get_nowait(), commands)
        except queue.Empty:
            return commands

    def _take(self, front: Front | None, command: Command | bool, commands: list[Command]) -> None:
        if front is None and command is False:
            return  # `wake`
        if front is None:
            self.is_ending = True
            for each in self._fronts.values():
                each.write(encode(Leaving()))
            commands.append(Shutdown())
        elif command is True:
            self._add(front)
        elif command is False:
            commands.extend(self._remove(front))
        elif front.number in self._fronts:
            assert not isinstance(command, bool)
            translated = self._translate(front, command)
            if translated is not None:
                commands.append(translated)

    def _add(self, front: Front) -> None:
        assert self._info is not None
        self._fronts[front.number] = front
        front.write(encode(Joining(self._name, self._instance, self._pid, self._info)))
        if self._published is not None:
            front.write(encode(replace(self._published, last_id=0)))

    def _remove(self, front: Front) -> list[Command]:
        self._fronts.pop(front.number, None)
        if front.ids:
            log.info("the front at %s is gone: %d of its requests are aborted", front.where, len(front.ids))
        aborts: list[Command] = [Abort(id) for id in front.ids.values()]
        for id in front.ids.values():
            del self._homes[id]
        front.ids.clear()
        self._asked = {ticket: asked for ticket, asked in self._asked.items() if asked[0] is not front}
        return aborts

    def _translate(self, front: Front, command: Command) -> Command | None:
        """The command as the engine is to see it; None: it means nothing here."""
        if isinstance(command, Submit):
            return self._open(front, command)
        if isinstance(command, Abort):
            # One that has ended may still be held for a peer, and is let go by this.
            id = front.ids.get(command.id) or self._ended.get((front.number, command.id))
            return None if id is None else replace(command, id=id)
        if isinstance(command, Explain):
            known = front.ids.get(command.id) or self._ended.get((front.number, command.id), 0)
            return self._ask(front, replace(command, id=known))
        if isinstance(command, GetStats):
            return self._ask(front, command)
        if isinstance(command, Reconfigure):
            return self._ask(front, command)
        if isinstance(command, LookUp):
            return self._ask(front, command)
        if isinstance(command, LoadAdapter):
            return self._ask(front, command)
        if isinstance(command, UnloadAdapter):
            return self._ask(front, command)
        if isinstance(command, WatchBlocks):
            front.watches = True
            self._askers.append(front)
            return command
        assert isinstance(command, Shutdown | Dismiss)  # of one front: `dial` ends that connection
        return None

    def _open(self, front: Front, submit: Submit) -> Submit:
        id = next(self._ids)
        stale = front.ids.pop(submit.id, None)
        if stale is not None:  # cannot be by a sound front; what it gets from now on is the new one's
            del self._homes[stale]
        front.ids[submit.id] = id
        front.last_id = max(front.last_id, submit.id)
        self._homes[id] = (front, submit.id)
        parent = None if submit.parent is None else front.ids.get(submit.parent)
        group = submit.group << _GROUP_BITS | front.number % (1 << _GROUP_BITS) if submit.group else 0
        return replace(submit, id=id, parent=parent, group=group)

    def _ask(self, front: Front, question: _Asked) -> _Asked:
        ticket = next(self._tickets)
        self._asked[ticket] = (front, question.ticket)
        return replace(question, ticket=ticket)

    def send(self, messages: Iterable[Message]) -> None:
        """Hand messages to the fronts that they are for; never waits."""
        waiting: dict[Front, bytearray] = {}

        def give(front: Front, message: Message) -> None:
            waiting.setdefault(front, bytearray()).extend(encode(message))

        for message in messages:
            self._give(message, give)
        for front, raw in waiting.items():
            front.write(bytes(raw))

    def _give(self, message: Message, give: Callable[[Front, Message], None]) -> None:
        if isinstance(message, Emission):
            for front, share in self._split(message).items():
                give(front, Emission(share.ids, share.tokens, share.finished, share.logprobs))
        elif isinstance(message, Output):
            home = self._end(message.id)
            if home is not None:
                give(home[0], replace(message, id=home[1]))
        elif isinstance(message, Reply):
            asked = self._asked.pop(message.ticket, None)
            if asked is not None:
                give(asked[0], replace(message, ticket=asked[1]))
            if isinstance(message, AdaptersNow):
                self._note_adapters(message, None if asked is None else asked[0], give)
        elif isinstance(message, BlockNews):
            askers = [self._askers.popleft()] if message.is_whole else list(self._fronts.values())
            for front in askers:
                if front.watches and front.number in self._fronts:
                    give(front, message)
        else:
            self._give_all(message, give)

    def _give_all(self, message: Message, give: Callable[[Front, Message], None]) -> None:
        if isinstance(message, Published):
            self._published = message
            for front in self._fronts.values():
                give(front, replace(message, last_id=front.last_id))
        elif isinstance(message, Ready):
            self._info = message.info
            self._on_ready()
        elif isinstance(message, Fatal):
            self.fatal = message
            for front in self._fronts.values():
                give(front, message)

    def _note_adapters(self, now: AdaptersNow, asker: Front | None, give: Callable[[Front, Message], None]) -> None:
        """What one front has loaded or unloaded, the others and those to come are told too."""
        assert self._info is not None
        self._info = replace(self._info, adapters=dict(now.adapters))
        for front in self._fronts.values():
            if front is not asker:
                give(front, AdaptersNow(0, now.adapters))

    def _split(self, step: Emission[Output]) -> dict[Front, _Share]:
        shares: dict[Front, _Share] = {}
        homes = self._homes
        for id, token in zip(step.ids, step.tokens, strict=True):
            home = homes.get(id)
            if home is not None:  # else its front is gone
                share = shares.get(home[0])
                if share is None:
                    share = shares[home[0]] = _Share()
                share.ids.append(home[1])
                share.tokens.append(token)
        for id, entries in step.logprobs.items():
            home = homes.get(id)
            if home is not None:
                shares.setdefault(home[0], _Share()).logprobs[home[1]] = list(entries)
        for output in step.finished:
            home = self._end(output.id)
            if home is not None:
                shares.setdefault(home[0], _Share()).finished.append(replace(output, id=home[1]))
        return shares

    def _end(self, id: int) -> tuple[Front, int] | None:
        """A request is over; whose it was, if that front is still there."""
        home = self._homes.pop(id, None)
        if home is not None:
            front, own = home
            del front.ids[own]
            self._ended[front.number, own] = id
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
        return home
