"""The manifests in `deploy/`: by the schemas of Kubernetes and of Serve, and their commands by headway itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cyclopts import CycloptsError

from headway.cli.main import create_app
from headway.cluster.ray_orders import from_options

DEPLOY = Path(__file__).parents[2] / "deploy"
VERSION = "1.34"


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def ray_service() -> dict[str, Any]:
    return next(each for each in manifests("rayservice.yaml") if each["kind"] == "RayService")


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every template of a pod, as a pod."""
    for each in manifests("kubernetes.yaml"):
        if "template" in each["spec"]:
            yield each["metadata"]["name"], each["spec"]["template"]
    cluster = ray_service()["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group.get("groupName", "head"), group["template"]


@pytest.mark.parametrize("name", ["kubernetes.yaml", "rayservice.yaml"])
def test_core_kinds_keep_to_their_schemas(name: str) -> None:
    core = [each for each in manifests(name) if each["kind"] != "RayService"]
    assert core
    for each in core:
        kubernetes_validate.validate(each, VERSION, strict=True)


@pytest.mark.parametrize(("name", "template"), pods(), ids=[name for name, _ in pods()])
def test_pods_keep_to_their_schema(name: str, template: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
    kubernetes_validate.validate(pod, VERSION, strict=True)
    volumes = {each["name"] for each in template["spec"].get("volumes", ())} | {"cache"}
    for container in template["spec"]["containers"]:
        assert {each["name"] for each in container.get("volumeMounts", ())} <= volumes


def test_a_field_that_is_not_there_is_found() -> None:
    broken = manifests("kubernetes.yaml")[0]
    broken["spec"]["template"]["spec"]["containers"][0]["image_"] = broken["spec"].pop("selector")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSION, strict=True)


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_commands_of_pods_are_headways(kind: str, tmp_path: Path) -> None:
    made = next(each for each in manifests("kubernetes.yaml") if each["kind"] == kind)
    (container,) = made["spec"]["template"]["spec"]["containers"]
    key = tmp_path / "key"
    key.write_text("k" * 32)
    tokens = [each.replace("/etc/headway/engine-key", str(key)) for each in container["args"]]
    create_app({}, tokens).parse_args(tokens)  # an option that is not there, or out of range, is an error
    wrong = [each.replace("--cache-dir", "--cache-folder") for each in tokens]
    with pytest.raises(CycloptsError, match="cache-folder"):
        create_app({}, wrong).parse_args(wrong)


def test_the_application_of_the_ray_service_keeps_to_serves_schema() -> None:
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    said = yaml.safe_load(ray_service()["spec"]["serveConfigV2"])
    schema = ServeDeploySchema.model_validate(said)
    (application,) = schema.applications
    assert application.import_path == "headway.cluster.ray_app:build"
    orders = from_options(application.args)
    assert orders.keeper.engine.model.threads == 4
    from headway.cluster.ray_app import DEPLOYMENT, build

    built = build(application.args)
    assert isinstance(built, serve.Application)
    assert [each.name for each in application.deployments] == [DEPLOYMENT]
    said["applications"][0]["deployments"][0]["num_replicas"] = "many"
    with pytest.raises(ValueError, match="num_replicas"):
        ServeDeploySchema.model_validate(said)
