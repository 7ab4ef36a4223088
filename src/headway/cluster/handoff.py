"""Requests that one engine begins and another goes on with: which engine has which part, and how it passes on.

    prefill engine   computes the prompt, gives the first token, keeps the KV for HOLD_S (state HELD)
    decode engine    is told where, fetches the KV block by block (state LOADING), goes on; then the KV is released

To the decode engine it is a request that was begun elsewhere, as after the death of an engine: if the KV does not come,
it computes what is missing. Engines whose role is `both` take requests from begin to end, and so does any other while
there is no engine of the other kind that it can reach: engines of the front's own machine reach each other over shared
memory, engines that joined reach each other by the addresses that they told.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from headway.cluster.handshake import host_of, is_loopback
from headway.cluster.joined import JoinedEngine
from headway.cluster.replica import Replica
from headway.engine.client import Output
from headway.engine.holder import RequestHolder
from headway.engine.journal import OpenRequest
from headway.engine.messages import Abort
from headway.errors import EngineError

HOLD_S = 10.0


def _with_role(replicas: Sequence[Replica], role: str) -> list[Replica]:
    return [each for each in replicas if each.engine.info is not None and each.engine.info.role == role]


@dataclass(frozen=True, slots=True)
class LetGo:
    """Tells the engine that keeps the KV of a request that this is not needed any more."""

    engine: RequestHolder
    id: int

    def __call__(self) -> None:
        with suppress(EngineError):  # it has ended: its lease with it
            self.engine.send(Abort(self.id))


def can_fetch(goal: RequestHolder, source: RequestHolder) -> bool:
    """True if `goal` reaches the KV of `source`, as far as is known, and both compute alike.

    An engine of the front's own machine has no certificates to check those of an engine that joined.
    """
    one, other = goal.info, source.info
    if one is None or other is None or not (one.fetch_at and other.fetch_at):
        return False
    if one.computes_with() != other.computes_with():
        return False
    joined = [each for each in (goal, source) if isinstance(each, JoinedEngine)]
    if len(joined) != 1 or is_loopback(host_of(joined[0].where)):
        return True
    kinds = ("tcp", "nixl", "tls") if joined[0] is goal else ("tcp", "nixl")
    for address in other.fetch_at.split(","):
        kind, _, where = address.partition(":")
        if kind in kinds and not is_loopback(host_of(where)):
            return True
    return False


def candidates(entry: OpenRequest, ready: Sequence[Replica]) -> Sequence[Replica]:
    """Of these replicas those that may have the request now; notes whether it is for its first token only."""
    prefills, decodes, submit = _with_role(ready, "prefill"), _with_role(ready, "decode"), entry.submit
    entry.hold_s = 0.0
    if not prefills or not decodes:
        return ready
    if entry.tokens:
        keeper = entry.let_go.engine if isinstance(entry.let_go, LetGo) else None
        near = [each for each in decodes if keeper is not None and can_fetch(each.engine, keeper)]
        return near or decodes
    prefills = [each for each in prefills if any(can_fetch(goal.engine, each.engine) for goal in decodes)]
    if not prefills:
        return ready
    if submit.params.max_tokens == 1:
        return prefills
    if submit.parent is not None or submit.params.n > 1:  # answers that share a prompt stay together
        return _with_role(ready, "both") or decodes
    entry.hold_s = HOLD_S
    return prefills


def pass_on(engine: RequestHolder, entry: OpenRequest, output: Output) -> None:
    """The first token is there: the next engine fetches from this one, which is told when it may let go."""
    entry.hold_s = 0.0
    entry.num_cached = output.cached_tokens
    entry.fetch_from, entry.fetch_tokens = "" if engine.info is None else engine.info.fetch_at, 0
    entry.let_go = LetGo(engine, entry.submit.id)


def arrive(engine: RequestHolder, entry: OpenRequest) -> None:
    """An engine is about to get the request: one that keeps its KV itself lets go first, and has it in its cache."""
    if isinstance(entry.let_go, LetGo) and entry.let_go.engine is engine:
        entry.release()
        entry.fetch_from = ""
