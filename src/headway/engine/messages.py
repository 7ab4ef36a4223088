"""What passes between a client and an engine that runs elsewhere: commands one way, messages the other.

Plain values. This file knows no socket, no thread and no encoding; `wire` writes these values to a socket
and `local` hands the very same objects to a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.engine.client import CacheHit, EngineInfo, Output, Settings, Stats, Submit
from headway.engine.explain import Explanation
from headway.engine.published import Published
from headway.errors import EngineDead
from headway.values.plan import Emission

VERSION = 7  # of the wire: both ends must speak the same
KEY_BYTES = 16  # of a block's key, in messages


class PeerGone(EngineDead):
    """The other end of the connection has ended, or speaks something we do not understand."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request; unknown ids are ignored."""

    id: int
    reason: str = "abort"


@dataclass(frozen=True, slots=True)
class GetStats:
    """Ask for the engine's numbers; the reply carries the same ticket."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Change settings of the running engine, all or none; without any, ask for those in force."""

    ticket: int
    changes: Settings


@dataclass(frozen=True, slots=True)
class Explain:
    """Ask why a request waited; the reply carries the same ticket."""

    ticket: int
    id: int


@dataclass(frozen=True, slots=True)
class LookUp:
    """Ask what the prefix cache has of a prompt; the reply carries the same ticket."""

    ticket: int
    submit: Submit


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load the adapter in a directory under a name; with a digest, only one that has it. The reply comes when it is."""

    ticket: int
    name: str
    path: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Free an adapter that no request has."""

    ticket: int
    name: str


@dataclass(frozen=True, slots=True)
class WatchBlocks:
    """Tell all blocks of the prefix cache, and from now on those that come and go."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the engine; nothing is read after it."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests from now on."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class StatsReply:
    """The answer to `GetStats`."""

    ticket: int
    stats: Stats


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """The answer to `Reconfigure`: what is in force now, or why nothing was changed."""

    ticket: int
    settings: Settings
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Explained:
    """The answer to `Explain`; None: the request is not known any more."""

    ticket: int
    explanation: Explanation | None


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The answer to `LookUp`."""

    ticket: int
    hit: CacheHit


@dataclass(frozen=True, slots=True)
class AdaptersNow:
    """The answer to `LoadAdapter` and `UnloadAdapter`: digests by name as they are now, or why nothing was changed."""

    ticket: int
    adapters: Mapping[str, str]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BlockNews:
    """Blocks that came to the prefix cache and went since the last such message, by the start of their keys."""

    added: Sequence[bytes] = ()
    removed: Sequence[bytes] = ()
    is_whole: bool = False  # what came is all there is: the answer to `WatchBlocks`


@dataclass(frozen=True, slots=True)
class Fatal:
    """The engine cannot start or go on; `is_config` says that the configuration is to blame."""

    message: str
    is_config: bool = False


# Between an engine and the fronts that it dials.


@dataclass(frozen=True, slots=True)
class Dismiss:
    """The front needs this engine no more, or cannot use it: it is not to dial again."""

    reason: str
    is_refusal: bool = False  # the engine is at fault


@dataclass(frozen=True, slots=True)
class Joining:
    """The first message of an engine that dialled in: it takes requests from now on."""

    name: str
    instance: str  # of its process: equal if it was here before
    pid: int
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Alive:
    """Comes every quarter of a second, whatever the engine does."""

    turns: int  # changes whenever its loop begins something else
    is_working: bool  # it is in a step or takes commands in
    patience_s: float  # how long it may be so without a turn


@dataclass(frozen=True, slots=True)
class Leaving:
    """The engine ends as planned; its requests may go on elsewhere."""


AboutAdapters = LoadAdapter | UnloadAdapter
Command = Submit | Abort | GetStats | Reconfigure | Explain | LookUp | WatchBlocks | AboutAdapters | Shutdown | Dismiss
Reply = StatsReply | Reconfigured | Explained | LookedUp | AdaptersNow
Message = Ready | Emission[Output] | Output | Reply | Fatal | Published | BlockNews | Joining | Alive | Leaving
