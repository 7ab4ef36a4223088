"""Main of the process that speaks with Ray for `headway serve --ray`: deploys, hands the load on, removes at the end.

A process of its own, since Ray ends a driver's whole process when the node or the store that it is connected to is
gone: then the server starts another one, and no stream notices. When the server ends, however it does, the socket
closes and the application is removed.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from headway import logs
from headway.cli.engine_child import end
from headway.cluster.ray_orders import Said, decode_orders, encode_line
from headway.errors import ConfigError, EngineDead
from headway.extras import missing

if TYPE_CHECKING:
    from headway.cluster.ray_app import RayDeployment

log = logging.getLogger(__name__)

_LOOK_S = 2.0  # between two looks at what Serve says of the application
_LOST_S = 30.0  # without an answer of Ray
_REMOVE_S = 30.0  # for the application to be removed
_READ_BYTES = 64 * 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Be the driver of one server's application until that server ends."""
    parser = argparse.ArgumentParser(prog="headway-ray", description="The Ray driver of headway serve --ray.")
    parser.add_argument("--fd", type=int, required=True)
    args = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # the server is told, and then ends this process
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=args.fd)
    lines = _lines(sock)
    first = next(lines, None)
    if first is None:
        return 0
    orders = decode_orders(first)
    _keep_own_errors()
    logs.set_up("ray", orders.keeper.log_level, orders.keeper.log_format)
    try:
        from headway.cluster.ray_app import RayDeployment
    except ImportError as error:
        return _fail(sock, f"{missing('headway serve --ray', 'ray', extra='ray')} ({error})")
    deployment = RayDeployment(orders)
    try:
        deployment.connect()
        deployment.deploy()
    except ConfigError as error:
        return _fail(sock, str(error))
    except Exception as error:  # whatever Ray raises
        log.exception("the application could not be deployed")
        return _fail(sock, f"Ray could not deploy the application: {_first_line(error)}")
    _say(sock, Said("deployed"))
    looks = Looks(deployment, sock)
    for line in lines:
        if looks.age_s > _LOST_S:
            _give_over(f"Ray has not answered for {looks.age_s:.0f} s")
        try:
            deployment.tell(line)
        except Exception as error:
            log.warning("the load could not be handed on: %s", _first_line(error))
    last = threading.Timer(_REMOVE_S, os._exit, (1,))
    last.daemon = True
    last.start()
    looks.end()  # one that comes too late would join the cluster anew
    deployment.remove()
    return 0


def _keep_own_errors() -> None:
    """Ray's core writes to descriptors 1 and 2 whatever the log's form is; it has log files of its own for that."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)


class Looks:
    """Looks at the application again and again. A driver whose node is lost may wait for it without an end."""

    def __init__(self, deployment: RayDeployment, sock: socket.socket) -> None:
        self._deployment, self._sock = deployment, sock
        self._is_over = threading.Event()
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="headway-look", daemon=True)
        self._thread.start()

    @property
    def age_s(self) -> float:
        """Seconds since Ray answered."""
        return time.monotonic() - self._last

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(_LOOK_S)

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            try:
                news = self._deployment.look()
            except EngineDead as error:
                _give_over(str(error))
            except Exception as error:  # the store or Serve's controller is away
                log.debug("Ray does not answer: %s", _first_line(error))
                continue
            self._last = time.monotonic()
            if news:
                _say(self._sock, Said("note", news))


def _give_over(why: str) -> NoReturn:
    log.error("%s; another process takes over", why)
    logging.shutdown()
    os._exit(1)


def _lines(sock: socket.socket) -> Iterator[bytes]:
    """Lines until the other end closes; of several that have come, `tell` needs the last one only, and they are few."""
    waiting = bytearray()
    while True:
        try:
            data = sock.recv(_READ_BYTES)
        except OSError:
            return
        if not data:
            return
        waiting += data
        *whole, rest = waiting.split(b"\n")
        waiting = bytearray(rest)
        yield from map(bytes, whole)


def _say(sock: socket.socket, said: Said) -> None:
    with suppress(OSError):  # the server has ended, which is noticed elsewhere
        sock.sendall(encode_line(said))


def _fail(sock: socket.socket, why: str) -> int:
    _say(sock, Said("failed", why))
    return 1


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code) if code == 0 else end(code)  # Ray's threads are not waited for
