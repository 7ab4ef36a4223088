"""What passes between a server and the process that speaks with Ray, and the options of a RayService."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.cluster.ray_orders import (
    KeeperOrders,
    RayOrders,
    Said,
    bundles,
    decode_load,
    decode_orders,
    decode_said,
    encode_line,
    engine_on_cluster,
    from_options,
    pack_keeper,
    unpack_keeper,
)
from headway.cluster.scaling import ClusterLoad, ScaleRule
from headway.config import EngineConfig
from headway.config_ray import RayConfig
from headway.errors import ConfigError

ENGINE = EngineConfig.of(model="model.gguf", max_num_seqs=8)


def test_what_is_sent_comes_out_as_it_went_in() -> None:
    keeper = KeeperOrders(ENGINE, "front:7500", key="k" * 32, tls_pem="-----BEGIN")
    orders = RayOrders(RayConfig(ray="auto", ray_min=2, ray_max=5, ray_requests=3.5), keeper, is_another=True)
    line = encode_line(orders)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_orders(line) == orders
    assert unpack_keeper(pack_keeper(keeper)) == keeper
    assert "kkk" not in f"{orders} {keeper!r}"
    load = ClusterLoad(3, 0.5, 2, 8)
    assert decode_load(encode_line(load)) == load
    assert decode_said(encode_line(Said("note", "a\nb"))) == Said("note", "a\nb")
    assert orders.rule == ScaleRule(3.5, 1.0)


def test_an_engine_has_the_threads_of_its_cpus_unless_told() -> None:
    config = RayConfig(ray="auto", ray_cpus=2.5)
    assert engine_on_cluster(ENGINE, config).model.threads == 2
    assert engine_on_cluster(ENGINE, RayConfig(ray_cpus=0.5)).model.threads == 1
    told = replace(ENGINE, model=replace(ENGINE.model, threads=7))
    assert engine_on_cluster(told, config) is told


def test_an_engine_takes_its_cpus_for_each_process_of_it() -> None:
    assert bundles(ENGINE, RayConfig()) == [{"CPU": 1.0}]
    assert bundles(EngineConfig.of(device="cuda", dtype="bfloat16"), RayConfig()) == [{"CPU": 1.0, "GPU": 1.0}]
    assert bundles(ENGINE, RayConfig(ray_gpus=0.5)) == [{"CPU": 1.0, "GPU": 0.5}]
    spread = EngineConfig.of(tensor_parallel=2)
    assert bundles(spread, RayConfig(ray_cpus=3)) == [{"CPU": 3}, {"CPU": 3}]


def test_flat_options_make_the_orders_of_a_service() -> None:
    given = {"model": "m.gguf", "join": "front:7500", "key_file": "/etc/key", "max_num_seqs": 9, "ray_min": 2}
    orders = from_options({**given, "ray_cpus": 4})
    assert orders.keeper.engine.model.model == "m.gguf"
    assert orders.keeper.engine.scheduler.max_num_seqs == 9
    assert orders.keeper.engine.model.threads == 4
    assert (orders.keeper.join, orders.keeper.key_file, orders.keeper.key) == ("front:7500", "/etc/key", None)
    assert orders.ray.ray_min == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "m"}, "needs join"),
        ({"join": "front"}, "HOST:PORT"),
        ({"join": "front:1", "modle": "m"}, "unknown option 'modle'"),
        ({"join": "front:1", "ray": "auto"}, "unknown option 'ray'"),
        ({"join": "front:1", "key": "secret"}, "unknown option 'key'"),  # Serve shows what is in its file
        ({"join": "front:1", "max_num_seqs": "many"}, "Expected `int"),
        ({"join": "front:1", "max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"join": "front:1", "ray_min": 0}, "ray_min is 0"),
        ({"join": 7}, "Expected `str"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_options(options)


@pytest.mark.parametrize(
    "fields",
    [
        {"ray": " "},
        {"ray_name": "a b"},
        {"ray_name": ""},
        {"ray_min": 0},
        {"ray_min": 3, "ray_max": 2},
        {"ray_max": 5000},
        {"ray_requests": 0.0},
        {"ray_wait_s": 0.0},
        {"ray_up_s": -1.0},
        {"ray_down_s": float("inf")},
        {"ray_cpus": 0.0},
        {"ray_gpus": -1.0},
    ],
)
def test_a_field_out_of_range_is_an_error(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        RayConfig(**fields)  # type: ignore[arg-type]
