"""Requests that one engine begins and another goes on with: which engine has which part, and how it passes on.

    prefill engine   computes the prompt, gives the first token, keeps the KV for HOLD_S (state HELD)
    decode engine    is told where, fetches the KV block by block (state LOADING), goes on; then the KV is released

To the decode engine it is a request that was begun elsewhere, as after the death of an engine: if the KV does not come,
it computes what is missing. Engines whose role is `both` take requests from begin to end, and so does any other while
there is no engine of the other kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from headway.cluster.replica import Replica
from headway.engine.client import Output
from headway.engine.holder import RequestHolder
from headway.engine.journal import OpenRequest
from headway.engine.messages import Abort
from headway.errors import EngineError

HOLD_S = 10.0


def _with_role(replicas: Sequence[Replica], role: str) -> list[Replica]:
    return [each for each in replicas if each.engine.info is not None and each.engine.info.role == role]


def candidates(entry: OpenRequest, ready: Sequence[Replica]) -> Sequence[Replica]:
    """Of these replicas those that may have the request now; notes whether it is for its first token only."""
    prefills, decodes, submit = _with_role(ready, "prefill"), _with_role(ready, "decode"), entry.submit
    entry.hold_s = 0.0
    if not prefills or not decodes:
        return ready
    wholes = _with_role(ready, "both")
    if entry.tokens:
        return decodes
    if submit.params.max_tokens == 1:
        return prefills
    if submit.parent is not None or submit.params.n > 1:  # answers that share a prompt stay together
        return wholes or decodes
    entry.hold_s = HOLD_S
    return prefills


def pass_on(engine: RequestHolder, entry: OpenRequest, output: Output) -> None:
    """The first token is there: the next engine fetches from this one, which is told when it may let go."""
    id = entry.submit.id

    def let_go() -> None:
        with suppress(EngineError):  # it has ended: its lease with it
            engine.send(Abort(id))

    entry.hold_s = 0.0
    entry.num_cached = output.cached_tokens
    entry.fetch_from = "" if engine.info is None else engine.info.fetch_at
    entry.let_go = let_go
