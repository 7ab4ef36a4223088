"""An engine that joins fronts: builds it, dials them, serves all of them until it is told to end.

    run_joined ─▶ engine on this thread ◀─ FrontsPort ◀─ Dialer on its own thread ◀─▶ fronts

The engine is built once: fronts come and go, the model stays. It ends by `stop`, by a signal that calls it, when every
front has refused or dismissed it, or with its parent's socket if one was given.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from types import FrameType

from headway.cluster.dial import Dialer, require_addresses
from headway.cluster.fetch_config import FetchConfig, own_host
from headway.cluster.fronts import FrontsPort
from headway.cluster.handshake import certified, parse_address, read_key, trusting
from headway.engine.child import ServedEngine, serve
from headway.engine.messages import Alive
from headway.engine.pulse import Activity, Pulse, PulseReader
from headway.errors import ConfigError

log = logging.getLogger(__name__)

REFUSED = 3  # exit code of an engine that no front wants: starting it again is of no use
_STEPS = 10.0  # times the predicted length of a step, before an engine is taken to stand still
_FIRST_STEP_S = 600.0  # a first step may have to read and convert much; nothing is predicted for it
_DEVICE_S = 60.0  # a step on a device may have a kernel compiled first
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """Which fronts an engine joins, and how it shows who it is."""

    join: str
    """HOST:PORT of a front that listens with --listen-engines; several with commas between."""
    key: str | None = None
    """The key that fronts and engines share; better in HEADWAY_KEY or --key-file than in a command line."""
    key_file: str | None = None
    """A file with that key."""
    tls_ca: str | None = None
    """A PEM file: the front must speak TLS, with a certificate that is signed by one of these."""
    name: str = ""
    """What this engine is called where a fleet is shown; the machine's name if not given."""
    kv_listen: str | None = None
    """[nixl:]HOST:PORT where other engines fetch KV; with a role, any port at the address the front is reached by."""
    kv_tls_cert: str | None = None
    """A PEM file: engines that fetch KV here speak TLS, and check this certificate by their --tls-ca."""
    kv_tls_key: str | None = None
    """The private key, in PEM; not needed if it is in the file of the certificate."""

    def __post_init__(self) -> None:
        require_addresses(self.join)
        if self.kv_tls_key is not None and self.kv_tls_cert is None:
            raise ConfigError("kv_tls_key is given without a certificate; give one with --kv-tls-cert")
        FetchConfig(self.kv_listen or "", key=read_key(self.key, self.key_file))
        trusting(self.tls_ca)
        self._kv_tls()

    def _kv_tls(self) -> ssl.SSLContext | None:
        if self.kv_tls_cert is None:
            return None
        return certified(self.kv_tls_cert, self.kv_tls_key, "--kv-tls-cert and --kv-tls-key")

    def fetching(self, role: str) -> FetchConfig:
        """Where an engine of this role lets others fetch its KV: nowhere if it is to do all and no place is named."""
        key, tls = read_key(self.key, self.key_file), trusting(self.tls_ca)
        if self.kv_listen is None and role == "both":
            return FetchConfig(key=key, client_tls=tls)
        front = require_addresses(self.join)[0]
        if self.kv_listen is None:
            host = own_host(front)
            return FetchConfig(f"[{host}]:0" if ":" in host else f"{host}:0", "", key, self._kv_tls(), tls)
        is_any = parse_address(self.kv_listen.removeprefix("nixl:"), "kv_listen")[0] in ("0.0.0.0", "::")
        return FetchConfig(self.kv_listen, own_host(front) if is_any else "", key, self._kv_tls(), tls)


def run_joined(
    config: JoinConfig,
    build: Callable[[], ServedEngine],
    *,
    has_device: bool = False,
    on_ready: Callable[[], None] = lambda: None,
    pulse_fd: int | None = None,
) -> int:
    """Build an engine and serve fronts with it until SIGTERM or SIGINT; the exit code. Takes over the process.

    With `pulse_fd` the process that started this one reads its page too.
    """
    reader = PulseReader(pulse_fd)
    pulse = Pulse(reader.fd)
    faulthandler.enable()  # a crash leaves its stacks in the log

    def ready() -> None:
        dialer.start()
        on_ready()

    port = FrontsPort(config.name or socket.gethostname(), token_hex(8), os.getpid(), ready)
    addresses = require_addresses(config.join)
    key, tls = read_key(config.key, config.key_file), trusting(config.tls_ca)
    dialer = Dialer(addresses, key, tls, port, lambda: _alive(reader, has_device=has_device))

    def end(number: int, frame: FrameType | None) -> None:
        port.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    code = serve(port, build, owns_process=True, pulse=pulse)
    dialer.stop()
    if port.fatal is not None:
        print(f"headway: {port.fatal.message}", file=sys.stderr)
    if dialer.refusals and len(dialer.refusals) == len(addresses):
        print(f"headway: {'; '.join(dialer.refusals)}", file=sys.stderr)
        return REFUSED
    return code


def _alive(reader: PulseReader, *, has_device: bool) -> Alive:
    beat = reader.read()
    return Alive(beat.turns, beat.activity is Activity.WORKING, patience(beat.expected_s, has_device=has_device))


def patience(expected_s: float, *, has_device: bool) -> float:
    """Seconds that a step of which so many were predicted may take; not a number: nothing was."""
    patience_s = _FIRST_STEP_S if math.isnan(expected_s) else _STEPS * expected_s
    return max(patience_s, _DEVICE_S) if has_device else patience_s


def die_with_parent() -> None:
    """Have the system end this process when the thread that started it ends; Linux alone can do that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
