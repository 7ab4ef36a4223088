"""The application in Ray Serve: keepers of engines, as many as the load needs. The only file that imports ray.

    server ═══ lines ═══▶ RayDeployment, a driver of its own process ─▶ RayBoard: orders and load, in memory
       ▲                        │ deploys                                  ▲ orders          ▲ load
       ║                  Serve's controller ─ LoadPolicy ─────────────────┼─────────────────┘
       ║                        │ starts, checks, ends                     │
       ╚═══ tokens ═══ engine ◀─ RayKeeper, a replica ────────────────────────┘

No request passes Serve: engines dial the front. That an engine is gone the front sees by its socket, at once; Ray only
brings another one. The key of the fleet is held by the board alone, in memory: arguments and environments of actors are
kept by Ray, and shown.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve

from headway import logs
from headway.cluster.handshake import parse_address
from headway.cluster.join import JoinConfig
from headway.cluster.keeper import EngineKeeper
from headway.cluster.ray_orders import (
    KeeperOrders,
    RayOrders,
    bundles,
    decode_load,
    from_options,
    pack_keeper,
    unpack_keeper,
)
from headway.cluster.scaling import ClusterLoad, ScaleRule, engines_needed
from headway.cluster.spawn import JoiningProcess, start_joining
from headway.errors import ConfigError, EngineDead

log = logging.getLogger(__name__)

NAMESPACE = "headway"
DEPLOYMENT = "Keeper"
_ASK_S = 0.25  # between two looks at the load
_FRESH_S = 3.0  # a load that is older says nothing
_ANSWER_S = 5.0  # for an actor to answer
_ORDERS_S = 60.0  # for a board to have orders: it may have been started anew
_TAKEN_S = 30.0  # for the application of a server that has just ended to go
_REACH_S = 5.0  # for a cluster to answer at all
_MOST_MISSING = 2  # looks at a board that is not there
_HEALTH_S = 1.0  # between two checks of a keeper


class RayBoard:
    """An actor that holds what keepers and the policy ask for. It is told all of it again and again."""

    def __init__(self) -> None:
        self._orders = self._load = b""
        self._at = -_FRESH_S

    def tell(self, orders: bytes, load: bytes) -> None:
        self._orders, self._load, self._at = orders, load, time.monotonic()

    def orders(self) -> bytes:
        return self._orders

    def load(self) -> bytes:
        """As it was told last, if that was not long ago."""
        return self._load if time.monotonic() - self._at < _FRESH_S else b""


class RayKeeper:
    """A replica: one engine process of its own, which ends with it. `board` names where orders are to be had."""

    def __init__(self, board: str | None, options: Mapping[str, Any] | None = None) -> None:
        orders = _orders_of(board) if board is not None else from_options(options or {}).keeper
        logs.set_up("keeper", orders.log_level, orders.log_format)
        self._ca = None if orders.tls_pem is None else _write_private(orders.tls_pem)
        join = JoinConfig(
            join=orders.join,
            key=orders.key,
            key_file=orders.key_file,
            tls_ca=self._ca or orders.tls_ca,
            name=_name_here(),
        )

        def start(pulse_fd: int, is_another: bool) -> JoiningProcess:
            return start_joining(
                orders.engine,
                join,
                log_level=orders.log_level,
                log_format=orders.log_format,
                is_another=is_another,
                pulse_fd=pulse_fd,
                dies_with_thread=True,
            )

        # Ray ends the workers of a node that was killed late, and not before that is reaped.
        wanted = EngineKeeper.parent_is_there()
        self._keeper = EngineKeeper(start, has_device=orders.engine.model.device != "cpu", is_wanted=wanted)
        atexit.register(self._keeper.end)
        self._keeper.wait_ready()

    def check_health(self) -> None:
        """EngineDead if there is no engine, nor will be; one that stands still is replaced by the keeper itself."""
        self._keeper.require_health()

    def __call__(self) -> None:
        raise EngineDead("no request passes Serve: ask the front that the engines have joined")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it did not come so far
            self._keeper.end()
            if self._ca is not None:
                Path(self._ca).unlink(missing_ok=True)


class LoadPolicy:
    """How many keepers there should be: asked by Serve's controller ten times a second, and never waits.

    Another thread asks the board for the load, and the board again if that is another one now.
    """

    def __init__(self, board: str, requests: float | None, wait_s: float) -> None:
        self._rule = ScaleRule(requests, wait_s)
        self._load: list[ClusterLoad | None] = [None]
        stop = threading.Event()
        weakref.finalize(self, stop.set)
        threading.Thread(target=_follow_load, args=(board, self._load, stop), name="headway-load", daemon=True).start()

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        load, now = self._load[0], context.target_num_replicas
        return (now if load is None else engines_needed(load, now, self._rule)), {}


def _follow_load(board: str, found: list[ClusterLoad | None], stop: threading.Event) -> None:
    actor: Any = None
    while not stop.wait(_ASK_S):
        try:
            actor = actor or ray.get_actor(board, namespace=NAMESPACE)
            raw = ray.get(actor.load.remote(), timeout=_ANSWER_S)
            found[0] = decode_load(raw) if raw else None
        except Exception as error:  # whatever Ray raises while a part of it is away: the number of engines stays
            found[0], actor = None, None
            logging.getLogger(__name__).debug("the load is not known: %s", error)


def board_name(name: str) -> str:
    return f"{name}-board"


def application(orders: RayOrders, options: Mapping[str, Any] | None = None) -> Any:
    """The Serve application. With `options` its keepers have all they need; else they ask the board."""
    config = orders.ray
    board = None if options is not None else board_name(config.ray_name)
    parts = bundles(orders.keeper.engine, config)
    how: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": {"num_cpus": parts[0]["CPU"], "num_gpus": parts[0].get("GPU", 0)},
        "health_check_period_s": _HEALTH_S,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": 10.0,
    }
    if len(parts) > 1:  # processes of one engine speak through gloo: one machine, and all of them or none
        how |= {"placement_group_bundles": parts, "placement_group_strategy": "STRICT_PACK"}
    most = config.ray_max or config.ray_min
    if board is None or most == config.ray_min:
        how["num_replicas"] = config.ray_min
    else:
        policy = {"board": board, "requests": config.ray_requests, "wait_s": config.ray_wait_s}
        how["autoscaling_config"] = {
            "min_replicas": config.ray_min,
            "max_replicas": most,
            "upscale_delay_s": config.ray_up_s,
            "downscale_delay_s": config.ray_down_s,
            "policy": {"policy_function": f"{__name__}:{LoadPolicy.__name__}", "policy_kwargs": policy},
        }
    return serve.deployment(RayKeeper, **how).bind(board, options)


def build(options: dict[str, Any]) -> Any:
    """For `import_path: headway.cluster.ray_app:build` in a Serve configuration or a RayService; args as options."""
    return application(from_options(options), options)


class RayDeployment:
    """This process as a driver: the application is there from `deploy` to `remove`."""

    def __init__(self, orders: RayOrders) -> None:
        self._orders = orders
        self._name = orders.ray.ray_name
        self._board: Any = None
        self._packed = b""
        self._problem = ""
        self._num_missing = 0  # looks in a row without the board

    def connect(self) -> None:
        """Join the cluster; ConfigError if there is none."""
        address = self._orders.ray.ray or "auto"
        what_to_do = "start one with: ray start --head, and give its address, or --ray auto on a machine of it"
        if address != "auto":
            host, port = parse_address(address, "ray")
            try:
                socket.create_connection((host, port), timeout=_REACH_S).close()
            except OSError as error:
                reason = error.strerror or str(error) or "no answer"
                raise ConfigError(f"no Ray cluster is reachable at {address}: {reason}; {what_to_do}") from None
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"no Ray cluster is reachable at {address}: {reason}; {what_to_do}") from None

    def deploy(self) -> None:
        """Make the board, and the application unless it is there and is to stay."""
        keeper = self._orders.keeper
        host, port = parse_address(keeper.join, "join")
        if host in ("0.0.0.0", "::"):
            host = str(ray.util.get_node_ip_address())
            host = f"[{host}]" if ":" in host else host
            keeper = keeper.joining(f"{host}:{port}")
        _require_reachable(host)
        self._packed = pack_keeper(keeper)
        self._board = self._make_board()
        ray.get(self._board.tell.remote(self._packed, b""), timeout=_ORDERS_S)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # its lines would be the server's
        serve.start(proxy_location="Disabled")
        is_there = self._name in serve.status().applications
        if is_there and self._orders.is_another:
            return
        if is_there:  # of a server that was killed together with its driver
            serve.delete(self._name)
        target = serve.RunTarget(target=application(self._orders), name=self._name, route_prefix=None)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def tell(self, load: bytes) -> None:
        """Hand the load on; does not wait."""
        self._board.tell.remote(self._packed, load)

    def look(self) -> str:
        """What is wrong with the application, if that is news; waits for Ray. EngineDead if its board is gone.

        The board of a head that was lost does not come back with the store: only another driver makes another one.
        """
        try:
            found = ray.get_actor(board_name(self._name), namespace=NAMESPACE)
            self._num_missing = 0 if found == self._board else self._num_missing + 1
        except ValueError:
            self._num_missing += 1
        if self._num_missing >= _MOST_MISSING:
            raise EngineDead("the board is gone")
        application = serve.status().applications.get(self._name)
        problem = "" if application is None else _problem(application)
        news = problem if problem != self._problem else ""
        self._problem = problem
        return news

    def remove(self) -> None:
        """Take the application away. The cluster is left when this process ends, as a late call would join it anew."""
        try:
            serve.delete(self._name)
        except Exception as error:  # whatever Ray raises where a part of it is away
            log.error("the application %s may still be on the cluster: %s", self._name, error)
        with contextlib.suppress(Exception):
            ray.kill(self._board)

    def _make_board(self) -> Any:
        name, until = board_name(self._name), time.monotonic() + _TAKEN_S
        made = ray.remote(RayBoard).options(name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=-1)
        while True:
            try:
                return made.remote()
            except ValueError:  # of another server, perhaps one that is just ending
                if time.monotonic() > until:
                    raise ConfigError(
                        f"another server has the application {self._name!r} in this cluster; give this one another "
                        "name with --ray-name, or end that one"
                    ) from None
            time.sleep(_ASK_S)


def _require_reachable(host: str) -> None:
    """ConfigError if engines of other machines are to join at an address that only this one has."""
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if host in ("localhost", "127.0.0.1", "::1", "[::1]") and len(machines) > 1:
        raise ConfigError(
            f"the cluster has {len(machines)} machines and engines are to join at {host}, which is each one's own: "
            "give --listen-engines HOST:PORT with an address of this machine that they reach"
        )


def _problem(application: Any) -> str:
    said = [application.message or ""]
    said += [deployment.message or "" for deployment in application.deployments.values()]
    is_well = application.status in ("RUNNING", "DEPLOYING", "DELETING", "NOT_STARTED")
    words = " ".join(part for part in dict.fromkeys(said) if part)
    if not is_well:
        return f"Ray Serve says {application.status}: {words}"
    return words if "resources" in words else ""


def _orders_of(board: str) -> KeeperOrders:
    """What the board has for keepers, which it may not have yet."""
    until = time.monotonic() + _ORDERS_S
    while True:
        try:
            actor: Any = ray.get_actor(board, namespace=NAMESPACE)
            raw: bytes = ray.get(actor.orders.remote(), timeout=_ANSWER_S)
            if raw:
                return unpack_keeper(raw)
            why = "it has none yet"
        except Exception as error:  # whatever Ray raises while a part of it is away
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
        if time.monotonic() > until:
            raise EngineDead(f"no orders are to be had of {board}: {why}; is the server there?")
        time.sleep(_ASK_S)


def _name_here() -> str:
    """What the engine is called where a fleet is shown: its machine and its replica."""
    return f"{socket.gethostname()}-ray-{serve.get_replica_context().rank.rank}"


def _write_private(text: str) -> str:
    descriptor, path = tempfile.mkstemp(prefix="headway-ca-", suffix=".pem")  # mode 0600
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    return path
