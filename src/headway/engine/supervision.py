"""What an engine's supervisor is told to do, and what it tells the owner of the engine's requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headway.engine.client import Output
from headway.engine.journal import OpenRequest
from headway.engine.messages import Message
from headway.errors import ConfigError, EngineDead
from headway.values.plan import Emission

if TYPE_CHECKING:
    from headway.engine.holder import RequestHolder


@dataclass(frozen=True, slots=True)
class Supervision:
    """What is done about an engine that ends or stands still."""

    resumes: bool = True  # answers that have begun go on; else they end with an error
    max_deaths: int = 3  # in a row, without a committed step between them, before it gives up
    stall_s: float = 3.0  # see `watchdog`; 0: no watchdog
    backoff_s: float = 0.5  # before the second start in a row; twice as long before the next


class EngineOwner(Protocol):
    """Is told what becomes of an engine and of the requests that it holds."""

    def engine_up(self, engine: RequestHolder) -> None:
        """A process is ready; requests are given to it next."""

    def engine_lost(self, engine: RequestHolder) -> None:
        """Its process is over; nothing that was asked of it will be answered."""

    def engine_ended(self, engine: RequestHolder) -> None:
        """Why it ended is known, another one is started next: requests may be taken away before."""

    def keeps_engine(self, engine: RequestHolder) -> bool:
        """True if it is not to be given up although its processes do not last."""

    def engine_failed(self, engine: RequestHolder, failure: EngineDead | ConfigError) -> None:
        """No other process is started; requests that are still with it then are lost."""

    def step_done(self, step: Emission[Output]) -> None:
        """Tokens of requests that it holds."""

    def request_refused(self, engine: RequestHolder, entry: OpenRequest) -> bool:
        """The engine was too full to take it; True if it goes to another one, else its end is told next."""

    def prompt_computed(self, engine: RequestHolder, entry: OpenRequest, output: Output) -> None:
        """A request that was to get one token has it, and its engine keeps the KV; the engine holds it no more."""

    def request_ended(self, output: Output) -> None:
        """A request's terminal output; the engine holds it no more."""

    def engine_said(self, engine: RequestHolder, message: Message) -> None:
        """Anything else."""
