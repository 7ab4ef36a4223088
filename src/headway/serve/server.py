"""The server process: listener, loading, signals, and the order in which everything ends.

    listen ─▶ load engine and text ─▶ READY ─▶ signal: drain ─▶ close connections ─▶ end the engine ─▶ exit

The listener is open from the start; until the engine is ready it answers 503. A first signal drains, a second
one stops waiting.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import uvicorn

from headway.cluster.client import FleetClient
from headway.config import EngineConfig, ModelConfig, ServeConfig, ServerConfig
from headway.engine.garbage import settle_garbage
from headway.engine.ranked import Forecast, RankedClient, open_forecast
from headway.errors import ConfigError, EngineDead, RequestError
from headway.grammar.check import GrammarChecker
from headway.modelfile.bundled import BUNDLED, locate
from headway.modelfile.cache import ModelCache, default_root
from headway.modelfile.source import open_model
from headway.serve.admin import AdminServer, admin_listener
from headway.serve.app import create_app
from headway.serve.connections import connection_limits
from headway.serve.embedder import open_embedder
from headway.serve.protocol import BoundedProtocol, http_config
from headway.serve.ray_front import RayFront
from headway.serve.reload import Reload
from headway.serve.service import ServedModel, Service
from headway.serve.tenants import Tenants
from headway.serve.tls import TlsListener, tls_context
from headway.text.chat import ChatTemplate
from headway.text.defaults import SamplingDefaults
from headway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# How long connections may take to close once their answers are out.
_CLOSE_S = 2
_HURRY_S = 0.2  # likewise once the time to shut down is over
# How long the engine may take to end by itself; nothing of it has to be saved.
_END_S = 0.2
_MOST_DESCRIPTORS = 8192
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK_BYTES = 256 * 1024


def serve_until_told(
    config: ServeConfig,
    client: FleetClient,
    on_ready: Callable[[str, str], None],
    reread: Callable[[], ServeConfig] | None = None,
    ray: RayFront | None = None,
) -> None:
    """Run the event loop to its end; raises ConfigError or EngineDead if the server never got ready.

    With `reread`, SIGHUP asks it for the configuration anew.
    """
    _return_large_blocks()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, client, on_ready, reread, ray))


async def _serve(
    config: ServeConfig,
    client: FleetClient,
    on_ready: Callable[[str, str], None],
    reread: Callable[[], ServeConfig] | None,
    ray: RayFront | None,
) -> None:
    service: Service | None = None
    forecast: Forecast | None = None
    try:
        tenants = Tenants.open(config.server, _cache(config.engine.model).root)
        service = Service(config.server, tenants)
        service.watch(client)
        forecast = open_forecast(config.engine.scheduler)
        listener = listen(config.server)
        server = DrainingServer(service, config.server)
        loading = asyncio.create_task(_load(config, client, ray, forecast, service, server, listener, on_ready))
        has_config = reread is not None or config.server.keys is not None
        on_hangup = Reload(config, reread, client, tenants).begin if has_config else _note_hangup
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)
        try:
            async with _administered(service, client, config.server.admin_socket):
                await server.serve(sockets=[listener])
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        if server.failure is not None:
            raise server.failure
    finally:
        await client.close(grace_s=_END_S)
        if ray is not None:
            await ray.close()
        if service is not None:
            if service.embedder is not None:
                await service.embedder.client.close()
            service.close()
        if forecast is not None:
            await asyncio.to_thread(forecast.close)


def _note_hangup() -> None:
    """The terminal is gone, or someone expects a reload: neither ends a server."""
    log.info("SIGHUP: there is neither --config nor --keys to read again")


@asynccontextmanager
async def _administered(service: Service, client: FleetClient, path: str | None) -> AsyncIterator[None]:
    """The admin endpoint as long as the context lasts, if a path for it was given."""
    if path is None:
        yield
        return
    with admin_listener(path) as listener:
        admin = AdminServer(service, client)
        serving = asyncio.create_task(admin.serve(sockets=[listener]))
        try:
            yield
        finally:
            admin.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)


async def _load(
    config: ServeConfig,
    client: FleetClient,
    ray: RayFront | None,
    forecast: Forecast | None,
    service: Service,
    server: DrainingServer,
    listener: socket.socket,
    on_ready: Callable[[str, str], None],
) -> None:
    """Wait for the engine, read tokenizer and template meanwhile, open the service; then wait for its end."""
    url = url_of(config.server, listener)
    try:
        await client.connect()
        if ray is not None:
            ray.begin(client, server.fail)
        if not _is_here(config.engine.model):
            await client.ready()  # the engine process fetches the model; this process must not fetch it a second time
        model, _, service.embedder = await asyncio.gather(
            asyncio.to_thread(_read_text, config.engine, client),
            client.ready(),
            open_embedder(config, _cache(config.engine.model)),
        )
        service.metrics.vectors = None if service.embedder is None else service.embedder.client
        settle_garbage()
        service.open(model if forecast is None else replace(model, client=RankedClient(client, forecast)))
        on_ready(url, model.name)
        raise EngineDead(await client.death())  # it cannot be brought back; whatever was open has been told
    except (ConfigError, EngineDead) as error:
        server.fail(error)
    except Exception as error:
        log.exception("the server could not start")
        server.fail(EngineDead(f"the server could not start: {error}"))


def _read_text(config: EngineConfig, client: FleetClient) -> ServedModel:
    source = open_model(config.model)
    template = ChatTemplate(source.chat_template, source.bos_token, source.eos_token)
    try:
        template.start()  # its process is slow to start, and the first chat request would wait for it
    except RequestError as error:
        log.warning("chat requests will fail: %s", error)
    tokenizer = Tokenizer.open(source.tokenizer_path())
    name = config.model.served_model_name or source.name
    defaults = SamplingDefaults.of(source.sampling, config.sampling)
    said = ", ".join(f"{name} {value:g}" for name, value in defaults.fill({}).items())
    log.info("sampling where a request does not say: %s", said)
    grammars = GrammarChecker(source.tokenizer_path(), tokenizer.vocab_size, source.eos_ids)
    return ServedModel(name, client, tokenizer, template, int(time.time()), defaults, grammars)


def _is_here(config: ModelConfig) -> bool:
    bundled = BUNDLED.get(config.model.lower())
    return bundled is None or locate(bundled, _cache(config)) is not None


def _cache(config: ModelConfig) -> ModelCache:
    return ModelCache(Path(config.cache_dir).expanduser() if config.cache_dir else default_root())


def listen(config: ServerConfig) -> socket.socket:
    """The listening socket; port 0 takes a free one."""
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]  # Python repeats the address there
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {reason}; choose another with --host and --port"
        ) from None


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """Where a client on this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(config.host, config.host)
    port = listener.getsockname()[1]
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class DrainingServer(uvicorn.Server):
    """Takes the place of uvicorn's own signal handling: the listener stays open while begun work finishes."""

    def __init__(self, service: Service, config: ServerConfig) -> None:
        level = "debug" if config.log_level == "debug" else "warning"
        limits = connection_limits(config.max_connections, config.max_connections_per_ip, _num_descriptors())
        self._tls = None if config.tls_cert is None else tls_context(config.tls_cert, config.tls_key)
        super().__init__(http_config(create_app(service), log_level=level, close_s=_CLOSE_S, connections=limits))
        self.failure: ConfigError | EngineDead | None = None
        self._service = service
        self._grace_s = config.shutdown_grace_s
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; with TLS by a listener of our own."""
        tls, sockets = self._tls, sockets or []
        await super().startup(sockets if tls is None else [])
        for listener in [] if tls is None else sockets:
            self.servers.append(TlsListener(listener, tls, self._make_protocol))  # type: ignore[arg-type]

    def _make_protocol(self) -> BoundedProtocol:
        state, app_state = self.server_state, self.lifespan.state
        made = self.config.http_protocol_class(config=self.config, server_state=state, app_state=app_state)  # type: ignore[call-arg]
        assert isinstance(made, BoundedProtocol)
        return made

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._loop.call_soon_threadsafe(self.stop, signal.Signals(sig).name)

    def stop(self, why: str) -> None:
        """Drain; asked again, stop waiting."""
        if self._draining is None:
            log.info("%s: finishing what has begun, for up to %g s", why, self._grace_s)
            self._service.begin_drain()
            self._draining = asyncio.create_task(self._drain())
        else:
            log.info("%s again: aborting what is left", why)
            self._service.abort_all()
            self._hurry()
            self.should_exit = True

    def fail(self, failure: ConfigError | EngineDead) -> None:
        """The engine did not come up, or not again."""
        self.failure = failure
        self.should_exit = True

    async def _drain(self) -> None:
        if not await self._service.drain(self._grace_s):
            self._hurry()
        self.should_exit = True

    def _hurry(self) -> None:
        """The end is not delayed any more: a connection that takes no bytes is closed."""
        self.config.timeout_graceful_shutdown = _HURRY_S  # type: ignore[assignment]


def _return_large_blocks() -> None:
    """Have bodies of megabytes give their memory back to the system; glibc keeps it, in pieces, once some were freed.

    Under a load of 8 MB bodies the process grows by 200 MB with it and by 500 MB without.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def _num_descriptors() -> int:
    """How many files this process may open, after asking for as many as it is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # not made for every platform
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
