"""The engine's own loop, for an engine that runs beside its caller: commands in, steps, messages out.

It serves one port and one engine until a `Shutdown` comes or the peer is gone. It blocks on the port only when
the engine has nothing to do, and then until the next lease ends. It knows neither sockets nor threads:
`wire.SocketPort` and `local` bring those.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from headway.engine.client import CacheHit, EngineInfo, Output, Settings, Stats, Submit
from headway.engine.explain import Explanation
from headway.engine.garbage import settle_garbage
from headway.engine.messages import (
    Abort,
    AboutAdapters,
    AdaptersNow,
    BlockNews,
    Command,
    Dismiss,
    Explain,
    Explained,
    Fatal,
    GetStats,
    LookedUp,
    LookUp,
    Message,
    PeerGone,
    Ready,
    Reconfigure,
    Reconfigured,
    Shutdown,
    StatsReply,
    WatchBlocks,
)
from headway.engine.published import Published
from headway.engine.pulse import Activity, Pulse
from headway.errors import ConfigError, Overloaded, RequestError, Unreachable
from headway.values.plan import Emission

log = logging.getLogger(__name__)

OVERLOADED = "server_is_overloaded"
# How long to wait when the engine has requests and none of them can move: something from outside must come first.
_IDLE_S = 0.005


class Port(Protocol):
    """Where commands come from and messages go."""

    def receive(self, timeout_s: float | None) -> Sequence[Command]:
        """Commands that have arrived, in order. If there is none, wait so long; None waits for ever."""

    def send(self, messages: Iterable[Message]) -> None:
        """Hand over messages in order. Like `receive` it raises PeerGone when the other end has ended."""


@runtime_checkable
class Wakeable(Protocol):
    """A port whose `receive` can be made to return from any thread."""

    def wake(self) -> None:
        """Let the `receive` of now, or the next one, return at once."""


@runtime_checkable
class Wakes(Protocol):
    """An engine with threads beside it that have something for it now and then."""

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, when the loop should look at this engine."""


class OwnsAdapters(Protocol):
    """What loads and unloads the adapters of an engine."""

    def apply(self, command: AboutAdapters) -> Sequence[AdaptersNow]:
        """Do it, or begin to; the reply, if it is known."""

    def done(self) -> Sequence[AdaptersNow]:
        """Replies to what has been done since."""


@runtime_checkable
class HasAdapters(Protocol):
    """An engine that may run adapters."""

    @property
    def adapters(self) -> OwnsAdapters | None: ...


class ServedEngine(Protocol):
    """What this loop needs of an engine."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report anything, now or when a lease ends."""

    @property
    def num_steps(self) -> int:
        """Steps that are committed."""

    def announce(self, told: Callable[[float], None]) -> None:
        """Call `told` when a step begins, with its predicted seconds; not a number where that is unknown."""

    def add(self, submit: Submit) -> None:
        """Take a request in; raises RequestError, Overloaded or Unreachable."""

    def abort(self, id: int, reason: str = "abort") -> Output | None:
        """End a request; its terminal output, or None if it had ended already."""

    def step(self) -> Emission[Output]:
        """Do one step and say what became of it."""

    def prepare(self) -> bool:
        """Use a moment without requests for what later steps would wait for; False if nothing is left of that."""

    def news(self) -> Published | None:
        """What a front end should know about waiting times; None if that is nothing new."""

    def watch_blocks(self) -> BlockNews:
        """Which blocks the prefix cache has; from now on `block_news` says what changes."""

    def block_news(self) -> BlockNews | None:
        """Blocks that came and went since the last call; None: none, or it is not watched."""

    def stats(self) -> Stats:
        """Numbers of now."""

    def explain(self, id: int) -> Explanation | None:
        """Why a request waited; None if it is not known any more."""

    def look_up(self, submit: Submit) -> CacheHit:
        """What the prefix cache has of a prompt."""

    def reconfigure(self, changes: Settings) -> Settings:
        """Change settings, all or none; what is in force then. ConfigError: they are at fault."""

    def close(self) -> None:
        """Release everything."""


def serve(port: Port, build: Callable[[], ServedEngine], *, owns_process: bool, pulse: Pulse | None = None) -> int:
    """Build the engine and run it until the peer says stop or is gone; the process's exit code."""
    try:
        engine = build()
    except ConfigError as error:
        port.send([Fatal(str(error), is_config=True)])
        return 2
    except Exception as error:
        log.exception("the engine could not start")
        port.send([Fatal(f"the engine could not start: {error}")])
        return 1
    if owns_process:
        settle_garbage(has_loop=True)
    try:
        port.send([Ready(engine.info)])
        run(engine, port, pulse)
    except PeerGone as gone:
        log.info("engine ends: %s", gone)
    except Exception as error:
        log.exception("the engine failed")
        port.send([Fatal(f"the engine failed: {error}")])
        return 1
    finally:
        engine.close()
    return 0


def run(engine: ServedEngine, port: Port, pulse: Pulse | None = None) -> None:
    """Commands first, then a step, for ever; returns on `Shutdown`. The pulse, if any, shows what it is at."""
    if pulse is not None:
        engine.announce(pulse.expect)
    enter: Callable[[Activity], None] = _show_nothing if pulse is None else pulse.enter
    if isinstance(engine, Wakes) and isinstance(port, Wakeable):
        engine.wake_by(port.wake)
    timeout_s: float | None = None
    while True:
        messages: list[Message] = []
        timeout_s = _longest_wait(engine, enter) if timeout_s is None else timeout_s
        if timeout_s != 0:
            enter(Activity.WAITING)
        commands = port.receive(timeout_s)
        enter(Activity.WORKING)
        for command in commands:
            if isinstance(command, Shutdown | Dismiss):
                return
            messages.extend(apply(engine, command))
        timeout_s = None
        if engine.has_work:
            if messages:  # a refusal is not delayed by the step of other requests
                enter(Activity.SENDING)
                port.send(messages)
                enter(Activity.WORKING)
                messages = []
            emission = engine.step()
            if pulse is not None:
                pulse.committed(engine.num_steps)
            if emission.ids or emission.finished:
                # Blocks first: a request that ends with this step may have lost some of its prompt to it.
                blocks = engine.block_news()
                messages += [emission] if blocks is None else [blocks, emission]
            timeout_s = 0.0 if emission.idle_s is None else max(_IDLE_S, emission.idle_s)
        messages += _adapters_of(engine).done()
        # Also where commands alone ended what there was: a front end that refuses by old news would do so for ever.
        messages += [news for news in (engine.news(), engine.block_news()) if news is not None]
        if messages:
            enter(Activity.SENDING)
            port.send(messages)


def _longest_wait(engine: ServedEngine, enter: Callable[[Activity], None]) -> float | None:
    """How long an engine without requests may wait for commands: not at all while there is something to do ahead."""
    enter(Activity.WORKING)
    return 0.0 if engine.prepare() else None


class _NoAdapters:
    def apply(self, command: AboutAdapters) -> Sequence[AdaptersNow]:
        return [AdaptersNow(command.ticket, {}, "this engine runs no adapters")]

    def done(self) -> Sequence[AdaptersNow]:
        return ()


def _adapters_of(engine: ServedEngine) -> OwnsAdapters:
    found = engine.adapters if isinstance(engine, HasAdapters) else None
    return _NoAdapters() if found is None else found


def _show_nothing(activity: Activity) -> None:
    pass


Applied = Submit | Abort | GetStats | Reconfigure | Explain | LookUp | WatchBlocks | AboutAdapters


def apply(engine: ServedEngine, command: Applied) -> list[Message]:
    """Have an engine do what it is told; what there is to answer at once."""
    if isinstance(command, Abort):
        output = engine.abort(command.id, command.reason)
        return [] if output is None else [output]
    if isinstance(command, WatchBlocks):
        return [engine.watch_blocks()]
    if isinstance(command, GetStats):
        return [StatsReply(command.ticket, engine.stats())]
    if isinstance(command, Explain):
        return [Explained(command.ticket, engine.explain(command.id))]
    if isinstance(command, LookUp):
        return [LookedUp(command.ticket, engine.look_up(command.submit))]
    if isinstance(command, Reconfigure):
        try:
            return [Reconfigured(command.ticket, engine.reconfigure(command.changes))]
        except ConfigError as error:
            return [Reconfigured(command.ticket, {}, str(error))]
    if isinstance(command, AboutAdapters):
        return [*_adapters_of(engine).apply(command)]
    return _add(engine, command)


def _add(engine: ServedEngine, command: Submit) -> list[Message]:
    try:
        engine.add(command)
    except RequestError as error:
        code = error.code or "invalid_value"
        return [Output(command.id, finish="error", error=str(error), code=code, param=error.param)]
    except Overloaded as error:
        return [Output(command.id, finish="error", error=str(error), code=OVERLOADED)]
    except Unreachable as error:
        return [Output(command.id, finish="shed", error=str(error), retry_after_s=error.retry_after_s)]
    except Exception as error:  # a fault of ours or of a plug-in, with this request: the others go on
        log.exception("request %d failed when it was taken in", command.id)
        engine.abort(command.id)  # whatever of it is there; should that fail too, this engine is beyond use
        return [Output(command.id, finish="error", error=f"it could not be taken in: {error!r}")]
    return []
