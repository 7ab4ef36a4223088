"""What passes between a server and the process that speaks with Ray for it, and what an engine on the cluster is told.

    server  ─▶  RayOrders, once; then Load, four times a second; then EOF: remove everything
    process ─▶  Said: it is deployed, something is worth a line in the log, or it cannot be done

One JSON object a line. This file needs no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

import msgspec

from headway.cluster.join import JoinConfig
from headway.cluster.scaling import ClusterLoad, ScaleRule
from headway.config import CacheConfig, EngineConfig, ModelConfig, SamplingConfig, SchedulerConfig
from headway.config_ray import RayConfig
from headway.errors import ConfigError


class KeeperOrders(msgspec.Struct, frozen=True):
    """What a keeper needs to start its engine. The key is among it: never in arguments, the environment or a log."""

    engine: EngineConfig
    join: str
    key: str | None = None
    key_file: str | None = None  # on the keeper's own machine
    tls_pem: str | None = None  # certificates, of which the front's must be one, or signed by one
    tls_ca: str | None = None  # a file with them, on the keeper's own machine
    log_level: str = "info"
    log_format: str = "text"

    def __repr__(self) -> str:
        return f"KeeperOrders(join={self.join!r})"  # nothing that shows values shows the key

    def joining(self, address: str) -> KeeperOrders:
        """The same, for a front at this address."""
        return msgspec.structs.replace(self, join=address)


class RayOrders(msgspec.Struct, frozen=True):
    """What is to be deployed, and where."""

    ray: RayConfig
    keeper: KeeperOrders
    is_another: bool = False  # after a process that ended: what it deployed is to stay

    @property
    def rule(self) -> ScaleRule:
        return ScaleRule(self.ray.ray_requests, self.ray.ray_wait_s)


class Said(msgspec.Struct, frozen=True):
    """What that process has to say."""

    kind: Literal["deployed", "note", "failed"]
    text: str = ""


def encode_line(value: RayOrders | ClusterLoad | Said) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def decode_orders(raw: bytes) -> RayOrders:
    return msgspec.json.decode(raw, type=RayOrders)


def decode_load(raw: bytes) -> ClusterLoad:
    return msgspec.json.decode(raw, type=ClusterLoad)


def decode_said(raw: bytes) -> Said:
    return msgspec.json.decode(raw, type=Said)


def pack_keeper(orders: KeeperOrders) -> bytes:
    return msgspec.msgpack.encode(orders)


def unpack_keeper(raw: bytes) -> KeeperOrders:
    return msgspec.msgpack.decode(raw, type=KeeperOrders)


def engine_on_cluster(engine: EngineConfig, ray: RayConfig) -> EngineConfig:
    """The engine as one on the cluster is to run it: with the threads of the CPUs that it takes there."""
    if engine.model.threads is not None:
        return engine
    return replace(engine, model=replace(engine.model, threads=max(1, int(ray.ray_cpus))))


def num_gpus(engine: EngineConfig, ray: RayConfig) -> float:
    """GPUs that each process of an engine takes."""
    return ray.ray_gpus if ray.ray_gpus is not None else float(engine.model.device == "cuda")


def bundles(engine: EngineConfig, ray: RayConfig) -> list[dict[str, float]]:
    """What one engine takes of one machine, by process: several where one model is spread over several."""
    each = {"CPU": ray.ray_cpus}
    if num_gpus(engine, ray):
        each["GPU"] = num_gpus(engine, ray)
    return [dict(each) for _ in range(engine.model.tensor_parallel)]


_PARTS = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "sampling": SamplingConfig}
_JOINING = ("join", "key_file", "tls_ca", "log_level", "log_format")


def from_options(options: Mapping[str, Any]) -> RayOrders:
    """Orders from flat options, as in the file of a RayService: those of `headway engine` and of RayConfig."""
    known = {each.name for kind in (RayConfig, *_PARTS.values()) for each in fields(kind)} | {*_JOINING}
    for name in options:
        if name not in known or name == "ray":
            raise ConfigError(f"unknown option {name!r} of the application; allowed: {', '.join(sorted(known))}")
    if "join" not in options:
        raise ConfigError("the application needs join: HOST:PORT of the front, which listens with --listen-engines")
    try:
        ray = msgspec.convert(_part(options, RayConfig), RayConfig)
        parts: dict[str, Any] = {name: msgspec.convert(_part(options, kind), kind) for name, kind in _PARTS.items()}
        engine = EngineConfig(**parts)
        joining = msgspec.convert({name: options[name] for name in _JOINING if name in options}, _JoinOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"an option of the application is wrong: {error}") from None
    JoinConfig(join=joining.join)  # says what is allowed
    return RayOrders(
        ray,
        KeeperOrders(
            engine_on_cluster(engine, ray),
            joining.join,
            key_file=joining.key_file,
            tls_ca=joining.tls_ca,
            log_level=joining.log_level,
            log_format=joining.log_format,
        ),
    )


class _JoinOptions(msgspec.Struct, frozen=True):
    join: str
    key_file: str | None = None
    tls_ca: str | None = None
    log_level: str = "info"
    log_format: str = "text"


def _part(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    return {each.name: options[each.name] for each in fields(kind) if each.name in options}
