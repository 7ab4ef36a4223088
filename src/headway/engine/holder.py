"""An engine as the holder of requests, wherever it runs: what those that own a process and those that joined share.

It holds a request from `take` to its terminal output, knows every token that came, and hands over again what an engine
that ended has left. How commands reach the engine, and what ends it, is left to those that know: `supervisor` for a
process of this machine, `cluster.joined` for one that dialled in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from headway.engine.child import OVERLOADED
from headway.engine.client import EngineInfo, Output, Settings, Submit
from headway.engine.journal import OpenRequest
from headway.engine.messages import Abort, Command
from headway.engine.streams import INTERRUPTED
from headway.engine.supervision import EngineOwner
from headway.engine.suspects import Suspects
from headway.errors import ConfigError, EngineDead
from headway.values.plan import Emission

RESTARTING = "the engine process is being replaced; try again in a few seconds"
PROOF = 2  # tokens after a resume that clear a suspect


class RequestHolder:
    """`entries` are the requests that it holds, by id. `failure` is set once it has given up."""

    where = "here"  # the machine it runs on, for people
    is_draining = False  # gets no new requests

    def __init__(self, owner: EngineOwner, name: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name  # for logs, where there are several
        self.entries: dict[int, OpenRequest] = {}
        self.info: EngineInfo | None = None  # of the last process that was ready
        self.failure: EngineDead | ConfigError | None = None
        self.settings: Settings = {}  # what was changed while it ran: the next process gets it too
        self.adapter_paths: dict[str, str] = {}  # of those that were loaded while it ran: likewise
        self.awaited: dict[int, str] = {}  # adapters that it was told to load since it is up, by ticket
        self.num_restarts = 0
        self.is_up = False
        self.is_between = False  # a process has ended, why is known, and the next one is not up
        self._is_closing = False
        self._owner = owner
        self._clock = clock
        self._suspects = Suspects()

    @property
    def pid(self) -> int | None:
        """Of its process; None between two of them."""
        raise NotImplementedError

    @property
    def takes_requests(self) -> bool:
        """True if a request that it is given now begins at once."""
        return self.is_up and not self.is_draining and not self._suspects.is_halving

    @property
    def recovering(self) -> float | None:
        """Seconds until requests are probably taken again; None while they are, or before it was up."""
        raise NotImplementedError

    def send(self, command: Command) -> None:
        """Hand over a command; EngineRestarting if there is no engine now."""
        raise NotImplementedError

    async def close(self, grace_s: float = 5.0) -> None:
        """End what belongs to this side."""
        raise NotImplementedError

    def _submit(self, submit: Submit, *, is_bounded: bool) -> None:
        """Hand over a request; Overloaded if it `is_bounded` and too much waits to be handed over."""
        raise NotImplementedError

    def take(self, entry: OpenRequest, *, is_new: bool) -> None:
        """Hold a request from now on. A new one is refused (Overloaded) while too much waits to reach the engine."""
        id = entry.submit.id
        entry.is_sent = False
        if self.is_up and self.may_have(id) and entry.submit.adapter not in self.awaited.values():
            self._hand_over(entry, is_new=is_new)
        self.entries[id] = entry

    def may_have(self, id: int) -> bool:
        """Whether the engine may have this request now."""
        return self._suspects.admits(id)

    def resume(self) -> None:
        """Suspects may have been let go, or an adapter is there."""
        self._resume()

    def suspect(self, id: int) -> None:
        """A request that it is given was with an engine when that crashed."""
        self._suspects.add(id)

    def give_away(self) -> list[OpenRequest]:
        """The requests that another engine may go on with; suspects stay, so that no other engine crashes by them."""
        free = [entry for id, entry in sorted(self.entries.items()) if id not in self._suspects]
        for entry in free:
            del self.entries[entry.submit.id]
        return free

    def abort(self, id: int, reason: str) -> None:
        """End a request; its terminal output follows, at once if no engine has it."""
        entry = self.entries[id]
        if entry.is_sent and self.is_up:
            entry.aborting = reason
            self.send(Abort(id, reason))
        else:
            self._settle(Output(id, finish=reason))

    def forget(self, id: int) -> None:
        """Nothing more is to be told about a request."""
        entry = self.entries.pop(id, None)
        if entry is not None:
            entry.release()
            if self._suspects.ended(id):
                self._resume()

    def _hand_over(self, entry: OpenRequest, *, is_new: bool) -> None:
        if is_new:
            self._submit(entry.submission(), is_bounded=True)
        else:
            self._submit(entry.resubmission(self._clock()), is_bounded=False)
        entry.is_sent = True

    def _settle(self, output: Output) -> None:
        entry = self.entries.pop(output.id, None)
        if entry is not None and self._is_first_part(entry, output):
            if entry.aborting is None:
                self._owner.prompt_computed(self, entry, output)
                return
            output = replace(output, finish=entry.aborting)  # its part was complete before the abort came
        if entry is not None:
            entry.release()
        if entry is None or output.code != OVERLOADED or not self._owner.request_refused(self, entry):
            self._owner.request_ended(output if entry is None else entry.settle(output, self._clock()))
        if self._suspects.ended(output.id):
            self._resume()

    def _is_first_part(self, entry: OpenRequest, output: Output) -> bool:
        """True if this engine was to give the first token only, has, and there is more to come."""
        if not entry.hold_s or output.finish != "length" or self.info is None:
            return False
        return bool(entry.tokens) and entry.finish(self.info.eos_ids) is None

    def _take_step(self, step: Emission[Output]) -> None:
        entries = self.entries
        for id, token in zip(step.ids, step.tokens, strict=True):
            entry = entries.get(id)
            if entry is not None:
                if not entry.tokens:
                    entry.first = self._clock()
                entry.tokens.append(token)
                if entry.num_resumes:
                    self._note_progress(entry)
        self._owner.step_done(step)
        for output in step.finished:
            self._settle(output)

    def _note_progress(self, entry: OpenRequest) -> None:
        entry.num_barren = 0
        if entry.let_go is not None:
            entry.release()
        if len(entry.tokens) - entry.num_before == PROOF and self._suspects.cleared(entry.submit.id):
            self._resume()

    def _resume(self) -> None:
        """Give the engine every request that it may have and has not."""
        if not self.is_up or self._is_closing or self.info is None:
            return
        eos_ids = self.info.eos_ids
        for id in sorted(self.entries):
            entry = self.entries.get(id)
            if entry is None or entry.is_sent or not self.may_have(id):
                continue
            if entry.submit.adapter in self.awaited.values():
                continue
            finish = entry.finish(eos_ids) if entry.tokens else None
            if finish is not None:
                self._settle(Output(id, finish=finish))
                continue
            self._hand_over(entry, is_new=False)

    def _interrupt(self, why: str) -> None:
        """End the answers that have begun; requests without a token are retried all the same."""
        for id in [id for id, entry in self.entries.items() if entry.tokens]:
            self._settle(Output(id, finish="error", error=f"this answer was cut off: {why}", code=INTERRUPTED))
