"""What `headway serve --ray` asks of a Ray cluster, as fields; a part of the configuration tree."""

from __future__ import annotations

from dataclasses import dataclass

from headway.config_text import require


@dataclass(frozen=True, slots=True)
class RayConfig:
    """Engines on the machines of a Ray cluster, as many as the load needs."""

    ray: str | None = None
    """HOST:PORT of a Ray cluster on which the engines run, or auto for the one of this machine; none if not given."""
    ray_name: str = "headway"
    """Name of the application in Ray Serve; each server on a cluster needs its own."""
    ray_min: int = 1
    """Fewest engines on the cluster."""
    ray_max: int | None = None
    """Most engines on the cluster; as ray_min if not given."""
    ray_requests: float | None = None
    """Open requests for each engine, above which more are started; the slots of an engine if not given."""
    ray_wait_s: float = 1.0
    """Predicted wait, above which more engines are started although there are slots for all requests."""
    ray_up_s: float = 2.0
    """How long more engines have to be needed before they are started."""
    ray_down_s: float = 60.0
    """How long fewer engines have to be enough before some are ended."""
    ray_cpus: float = 1.0
    """CPUs that an engine takes on the cluster; also its threads, unless threads is given."""
    ray_gpus: float | None = None
    """GPUs that an engine takes on the cluster; 1 with device cuda, else 0, if not given."""

    def __post_init__(self) -> None:
        is_some = self.ray is None or bool(self.ray.strip())
        require(is_some, "ray", self.ray, "HOST:PORT of a Ray cluster, such as 10.0.0.1:6379, or auto")
        is_name = self.ray_name.replace("-", "").replace("_", "").isalnum()
        require(is_name, "ray_name", self.ray_name, "letters, digits, - and _")
        require(1 <= self.ray_min <= 1024, "ray_min", self.ray_min, "1 to 1024")
        is_more = self.ray_max is None or self.ray_min <= self.ray_max <= 1024
        require(is_more, "ray_max", self.ray_max, f"ray_min, which is {self.ray_min}, to 1024")
        is_some = self.ray_requests is None or 0 < self.ray_requests < 1e9
        require(is_some, "ray_requests", self.ray_requests, "a number above 0")
        require(0 < self.ray_wait_s < 1e9, "ray_wait_s", self.ray_wait_s, "seconds, above 0")
        for name in ("ray_up_s", "ray_down_s"):
            require(0 <= getattr(self, name) < 1e9, name, getattr(self, name), "seconds, 0 or more")
        require(0 < self.ray_cpus <= 4096, "ray_cpus", self.ray_cpus, "above 0, to 4096")
        is_some = self.ray_gpus is None or 0 <= self.ray_gpus <= 64
        require(is_some, "ray_gpus", self.ray_gpus, "0 to 64")
