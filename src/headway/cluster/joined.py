"""An engine that dialled in, as a replica: it holds requests like one of this machine, but owns its own process.

    joins ─▶ UP ──connection closes, silence, or a step that does not end──▶ AWAY ─▶ joins again, or is forgotten
                        └─ what it held goes on elsewhere at once, token for token

Its process cannot be looked at from here: it says four times a second that it lives and whether its loop turns.
Messages of an earlier connection are not listened to, and neither are those about a request that was taken back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from headway.cluster.ward import Ward
from headway.engine.client import Output, Submit
from headway.engine.holder import RequestHolder
from headway.engine.journal import OpenRequest
from headway.engine.messages import Abort, Alive, Command, Dismiss, Fatal, Joining, Leaving, Message, Reconfigure
from headway.engine.supervision import EngineOwner, Supervision
from headway.errors import EngineError, EngineRestarting, Overloaded
from headway.values.plan import Emission

log = logging.getLogger(__name__)

SILENCE_S = 2.0  # without a message, or without progress of a step of which less was predicted
_HEARD_S = 0.6  # two beats and some
AWAY = "the engine is away; try again in a few seconds"


class EngineLink(Protocol):
    """One connection to an engine."""

    where: str  # its address

    @property
    def num_pending(self) -> int:
        """Bytes that wait to be sent."""

    def send(self, command: Command) -> None:
        """Hand over a command; nothing happens once the connection is closed."""

    def close(self) -> None:
        """End it once its last words are read."""

    def abort(self) -> None:
        """End it now."""


class JoinedEngine(RequestHolder):
    """`link` is the connection of now, None while it is away."""

    def __init__(
        self,
        join: Joining,
        owner: EngineOwner,
        rules: Supervision,
        ward: Ward,
        *,
        max_pending: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(owner, join.name, clock=clock)
        self._rules = rules
        self._suspects = self._ward = ward
        self._max_pending_bytes = max_pending
        self.link: EngineLink | None = None
        self.instance = join.instance
        self.joined_as = join.name  # `name` differs if another engine had that
        self.away_since = 0.0
        self._pid = join.pid
        self._beat = Alive(-1, False, 0.0)
        self._silent_s = self._still_s = 0.0
        self._stale: set[int] = set()  # taken back, and the engine has not said so yet

    @property
    def pid(self) -> int | None:
        return None if self.link is None else self._pid

    @property
    def recovering(self) -> float | None:
        return None if self.is_up else 1.0

    # Connections.

    def attach(self, link: EngineLink, join: Joining) -> None:
        """It is here, perhaps again."""
        before, self.info = self.info, join.info
        self.link, self.instance, self._pid, self.where = link, join.instance, join.pid, link.where
        self.is_up, self.is_between = True, False
        self._silent_s = self._still_s = 0.0
        self._stale.clear()
        self.awaited.clear()
        self.num_restarts += before is not None
        if before is not None and before.computes_with() != join.info.computes_with():
            self._interrupt("the engine that replaced it computes differently")
        if self.settings:
            self.send(Reconfigure(0, self.settings))
        self._owner.engine_up(self)
        self._resume()

    def lost(self, link: EngineLink, why: str, *, is_crash: bool, is_asked: bool = False) -> None:
        """A connection is over: what the engine held goes on elsewhere."""
        if link is not self.link:
            return
        self.link, self.is_up = None, False
        self.away_since = self._clock()
        if is_asked:
            link.close()
        else:
            link.abort()
        log.log(logging.INFO if is_asked else logging.ERROR, "engine %s at %s is gone: %s", self.name, self.where, why)
        self._owner.engine_lost(self)
        self._account(is_crash=is_crash)
        self.is_between = True
        self._owner.engine_ended(self)

    def _account(self, *, is_crash: bool) -> None:
        held = {id: entry for id, entry in self.entries.items() if entry.is_sent}
        for id, entry in held.items():
            entry.is_sent = False
            entry.num_barren += is_crash
            if entry.aborting is not None:
                self._settle(Output(id, finish=entry.aborting))
        if not self._rules.resumes:
            self._interrupt("the engine has ended")
        held = {id: entry for id, entry in held.items() if id in self.entries}
        if held and is_crash:
            blamed = self._ward.lost(held)
            if blamed is not None:
                log.error("request %d ended one engine after the other: it fails", blamed)
                self._settle(Output(blamed, finish="error", error="this request ended the engine process"))

    def look(self, passed_s: float) -> None:
        """So much time has passed; drop an engine that says nothing or stands still."""
        link = self.link
        if link is None or self._rules.stall_s == 0:
            return
        self._silent_s += passed_s
        if not (self._beat.is_working and self.entries):
            self._still_s = 0.0
        elif self._silent_s <= _HEARD_S:  # what is not heard of is away, and not known to stand still
            self._still_s += passed_s
        if self._silent_s >= SILENCE_S:
            self.lost(link, f"it said nothing for {self._silent_s:.1f} s", is_crash=False)
        elif self._still_s >= max(SILENCE_S, self._beat.patience_s):
            self.lost(link, f"its step has not ended for {self._still_s:.1f} s", is_crash=True)

    def dismiss(self, reason: str) -> None:
        """It is not wanted here any more."""
        link = self.link
        if link is not None:
            link.send(Dismiss(reason))
            self.lost(link, reason, is_crash=False, is_asked=True)

    async def close(self, grace_s: float = 5.0) -> None:
        self._is_closing = True
        link, self.link, self.is_up = self.link, None, False
        if link is not None:
            link.abort()

    # Requests.

    def send(self, command: Command) -> None:
        if self.link is None:
            raise EngineRestarting(AWAY)
        self.link.send(command)

    def _submit(self, submit: Submit, *, is_bounded: bool) -> None:
        assert self.link is not None
        if is_bounded and self.link.num_pending > self._max_pending_bytes:
            raise Overloaded("the engine is busy and too many requests wait to reach it; try again", retry_after_s=2.0)
        self.link.send(submit)

    def may_have(self, id: int) -> bool:
        if id in self._stale:  # what is left of an earlier attempt ends first
            return False
        if id not in self._ward:
            return True
        return self._ward.has_room(id, [each for each, entry in self.entries.items() if entry.is_sent and each != id])

    def suspect(self, id: int) -> None:
        """Nothing to do: all engines that joined have their suspects in common."""

    def give_away(self) -> list[OpenRequest]:
        """All that it holds; what an engine still works on is taken back."""
        return self.take_back(sorted(self.entries))

    def take_back(self, ids: Sequence[int]) -> list[OpenRequest]:
        """These of its requests, for another engine."""
        given = [self.entries.pop(id) for id in ids]
        for entry in given:
            if entry.is_sent and self.link is not None:
                self._stale.add(entry.submit.id)
                self.send(Abort(entry.submit.id))
            entry.is_sent = False
        return given

    def not_begun(self) -> list[int]:
        """Requests that another engine had first and this one gave no token: those that were sent, then the others."""
        ids = [id for id, entry in sorted(self.entries.items()) if entry.aborting is None and entry.let_go is None]
        waiting = [id for id in ids if not self.entries[id].is_sent]
        return [id for id in ids if self.entries[id].is_sent and self.entries[id].is_again] + waiting

    # Messages of the connection of now.

    def take_message(self, link: EngineLink, message: Message) -> None:
        if link is not self.link:
            return
        self._silent_s = 0.0
        if isinstance(message, Emission):
            self._take_step(self._own(message))
        elif isinstance(message, Output):
            if not message.finish:
                raise EngineError("an end that is none")
            if self._is_own(message.id):
                self._settle(message)
            self._note_end(message.id)
        elif isinstance(message, Alive):
            if message.turns != self._beat.turns:
                self._still_s = 0.0
            self._beat = message
        elif isinstance(message, Leaving):
            self.lost(link, "it ends as planned", is_crash=False, is_asked=True)
        elif isinstance(message, Fatal):
            self.lost(link, message.message, is_crash=True)
        else:
            self._owner.engine_said(self, message)

    def _is_own(self, id: int) -> bool:
        """True for a request that this engine was given; no engine speaks for another one's."""
        entry = self.entries.get(id)
        return entry is not None and entry.is_sent

    def _note_end(self, id: int) -> None:
        """If this request was taken back, the engine has none of it any more."""
        if id in self._stale:
            self._stale.discard(id)
            self._resume()

    def _own(self, step: Emission[Output]) -> Emission[Output]:
        """The part of a step that is about requests of this engine; EngineError if it makes no sense, before any of it
        is believed."""
        if len(step.ids) != len(step.tokens) or not all(output.finish for output in step.finished):
            raise EngineError("a step whose columns differ, or with an end that is none")
        is_own = {id: self._is_own(id) for id in {*step.ids, *step.logprobs, *(each.id for each in step.finished)}}
        if all(is_own.values()):
            return step
        kept = [(id, token) for id, token in zip(step.ids, step.tokens, strict=True) if is_own[id]]
        for output in step.finished:
            self._note_end(output.id)
        return Emission(
            [id for id, _ in kept],
            [token for _, token in kept],
            [output for output in step.finished if is_own[output.id]],
            {id: entries for id, entries in step.logprobs.items() if is_own[id]},
        )
