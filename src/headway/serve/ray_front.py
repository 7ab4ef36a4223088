"""The server's side of Ray: a process that deploys engines on a cluster for it, and is told the load.

    server ─▶ RayFront ═══ socket ═══ cli.ray_child ─▶ the cluster ─▶ keepers ─▶ engines that join the server

That process may end at any time: another one is started, the engines stay, and no stream notices. Only at the first
attempt is a fault an error of the server's. This file needs no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

from headway.cluster.client import FleetClient
from headway.cluster.handshake import parse_address, read_key
from headway.cluster.ray_orders import KeeperOrders, RayOrders, decode_said, encode_line, engine_on_cluster
from headway.cluster.scaling import measure
from headway.config import EngineConfig, ServeConfig, ServerConfig
from headway.errors import ConfigError, EngineDead
from headway.extras import has_ray, missing

log = logging.getLogger(__name__)

DRIVER = ("-P", "-m", "headway.cli.ray_child")
_EVERY_S = 0.25  # the load is told
_FIRST_S, _LONGEST_S = 0.5, 30.0  # before another process is started; twice as long after each
_LASTING_S = 60.0
_REMOVE_S = 35.0  # for the application to be removed
_MOST_LINE_BYTES = 1 << 20
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)


def require_ray() -> None:
    """ConfigError if the package is not there: said before anything is started."""
    if not has_ray():
        raise ConfigError(missing("headway serve --ray", "ray", "leave --ray out", extra="ray"))


def for_ray(server: ServerConfig) -> ServerConfig:
    """The server's options as engines on a cluster need them: a port where they join, a key, none of its own."""
    if server.replicas != 1:
        raise ConfigError(f"replicas is {server.replicas}, and with ray all engines run on the cluster; use --ray-min")
    has_key = server.engine_key is not None or server.engine_key_file is not None
    return replace(
        server,
        replicas=0,
        listen_engines=server.listen_engines or "127.0.0.1:0",
        engine_key=server.engine_key if has_key else token_hex(32),
    )


class RayFront:
    """From `begin` on a driver is on the cluster; `close` has it remove what it deployed."""

    def __init__(self, config: ServeConfig, server: ServerConfig, *, command: Sequence[str] = DRIVER) -> None:
        self._config, self._server = config, server
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_deployed = False
        self._task: asyncio.Task[None] | None = None

    def begin(self, client: FleetClient, on_failure: Callable[[ConfigError | EngineDead], None]) -> None:
        """Deploy, in the running event loop; `on_failure` is called if that cannot be done at first."""

        async def run() -> None:
            try:
                await self._run(client)
            except ConfigError as error:
                on_failure(error)
            except Exception as error:
                log.exception("the part of the server that speaks with Ray failed")
                on_failure(EngineDead(f"the part of the server that speaks with Ray failed: {error}"))

        self._task = asyncio.create_task(run())

    async def _run(self, client: FleetClient) -> None:
        """Returns never; ConfigError if the application cannot be deployed at first."""
        assert client.gate is not None
        orders = self._orders(client.gate.port)
        loop, pause_s = asyncio.get_running_loop(), _FIRST_S
        while True:
            began = loop.time()
            failure = await self._drive(replace_another(orders, self._is_deployed), client)
            if not self._is_deployed:
                raise ConfigError(failure or "the process that speaks with Ray ended; its log says why")
            pause_s = _FIRST_S if loop.time() - began > _LASTING_S else pause_s
            log.warning(
                "the process that speaks with Ray ended%s; the engines stay, and another one starts in %g s",
                f": {failure}" if failure else "",
                pause_s,
            )
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_S, 2 * pause_s)

    async def close(self) -> None:
        """Have the application removed, and wait for that."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        process, writer = self._process, self._writer
        if process is None:
            return
        log.info("the application %s is removed from Ray", self._config.ray.ray_name)
        if writer is not None:
            writer.close()
        try:
            async with asyncio.timeout(_REMOVE_S):
                await process.wait()
        except TimeoutError:
            log.error("Ray did not remove the application %s in %g s", self._config.ray.ray_name, _REMOVE_S)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.returncode:
            name = self._config.ray.ray_name
            log.error("the application %s may still be on the cluster; serve.delete(%r) removes it", name, name)
        self._process = None

    async def _drive(self, orders: RayOrders, client: FleetClient) -> str:
        """One process from its start to its end; why it failed, if it said so."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._command,
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),  # standard output is for the addresses of the server
                start_new_session=True,  # Ctrl-C reaches the server, which then decides
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=_MOST_LINE_BYTES)
        self._writer = writer
        writer.write(encode_line(orders))
        telling = asyncio.create_task(_tell(writer, client))
        failure = ""
        try:
            while line := await reader.readline():
                said = decode_said(line)
                if said.kind == "failed":
                    failure = said.text
                elif said.kind == "note":
                    log.warning("%s", said.text)
                else:
                    self._is_deployed = True
                    log.info("the application %s is deployed on Ray", orders.ray.ray_name)
        except (OSError, ValueError) as error:
            failure = failure or str(error)  # what it said itself, before it ended, tells more
        finally:
            telling.cancel()
            writer.close()
        await process.wait()
        self._process = None
        return failure

    def _orders(self, port: int) -> RayOrders:
        server, ray = self._server, self._config.ray
        assert server.listen_engines is not None
        host, _ = parse_address(server.listen_engines, "listen_engines")
        key = read_key(server.engine_key, server.engine_key_file)
        keeper = KeeperOrders(
            _portable(engine_on_cluster(self._config.engine, ray)),
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            key=None if key is None else key.decode(),
            tls_pem=None if server.tls_cert is None else certificates(server.tls_cert),
            log_level=server.log_level,
            log_format=server.log_format,
        )
        return RayOrders(ray, keeper)


def replace_another(orders: RayOrders, is_another: bool) -> RayOrders:
    return RayOrders(orders.ray, orders.keeper, is_another)


def certificates(path: str) -> str:
    """The certificates of a PEM file, and not the key, which may be in it too."""
    try:
        found = _CERTIFICATE.findall(Path(path).expanduser().read_text(encoding="ascii"))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read the certificate {path}: {error}") from None
    return "".join(found)


def _portable(engine: EngineConfig) -> EngineConfig:
    """Without what several engines on one machine must not share."""
    return replace(engine, scheduler=replace(engine.scheduler, step_log=None))


async def _tell(writer: asyncio.StreamWriter, client: FleetClient) -> None:
    while not writer.is_closing():
        writer.write(encode_line(measure(client)))
        with suppress(ConnectionError):
            await writer.drain()
        await asyncio.sleep(_EVERY_S)
