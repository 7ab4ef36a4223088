"""`headway serve --ray`: what it says where it cannot, what it hands over; where Ray is installed, that it works."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import echo_join
from headway.cluster.ray_orders import KeeperOrders, RayOrders, decode_said, encode_line
from headway.config import EngineConfig, ServerConfig
from headway.config_ray import RayConfig
from headway.errors import ConfigError
from headway.extras import has_ray
from headway.serve.ray_front import certificates, for_ray
from raw_http import call
from tiny_dir import write_tiny_model

TLS = Path(echo_join.__file__).parent / "tls"
HAS_RAY = has_ray()


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headway.cli.main", "serve", "--port", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_a_server_on_a_cluster(tmp_path: Path) -> None:
    """For real where Ray is installed; elsewhere, for real too, that it says what to install."""
    if not HAS_RAY:
        done = serve("--ray", "auto")
        assert done.returncode == 2
        assert done.stdout == ""
        assert "headway serve --ray needs ray, which is not installed; install it by pip install" in done.stderr
        assert "[ray]" in done.stderr
        return
    from ray_fleet import engines_here, ray_cluster

    before = engines_here()
    write_tiny_model(tmp_path / "tiny")
    with ray_cluster(tmp_path / "gcs") as cluster, served(tmp_path, "--ray", cluster.address) as url:
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        status, answer, *_ = call(url, "POST", "/v1/completions", body)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 20  # type: ignore[index]
        assert len(engines_here() - before) == 1
    assert engines_here() <= before


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[str]:
    command = [sys.executable, "-m", "headway.cli.main", "serve", str(folder / "tiny"), "--port", "0", *arguments]
    command += ["--cache-dir", str(folder / "cache")]
    with (folder / "log").open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    with process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, (folder / "log").read_text()
            yield found.group()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, (folder / "log").read_text()
        finally:
            process.kill()
    log = (folder / "log").read_text()
    assert "is deployed on Ray" in log
    assert "is removed from Ray" in log


def test_a_cluster_that_is_not_there_is_named() -> None:
    port = free_port()
    done = serve("--ray", f"127.0.0.1:{port}")
    assert done.returncode == 2
    assert (f"no Ray cluster is reachable at 127.0.0.1:{port}" if HAS_RAY else "needs ray") in done.stderr
    assert ("ray start --head" if HAS_RAY else "pip install") in done.stderr


def test_the_process_that_speaks_with_ray_says_what_it_lacks() -> None:
    orders = RayOrders(RayConfig(ray=f"127.0.0.1:{free_port()}"), KeeperOrders(EngineConfig.of(), "127.0.0.1:1"))
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "headway.cli.ray_child", "--fd", str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as process:
        theirs.close()
        ours.sendall(encode_line(orders))
        said = decode_said(ours.makefile("rb").readline())
        assert said.kind == "failed"
        assert ("no Ray cluster is reachable" if HAS_RAY else "needs ray, which is not installed") in said.text
        assert process.wait(60) == 1


def test_the_process_that_speaks_with_ray_ends_with_its_server() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "headway.cli.ray_child", "--fd", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as process:
        theirs.close()
        ours.close()
        assert process.wait(60) == 0


def test_engines_of_a_cluster_get_a_port_and_a_key() -> None:
    server = for_ray(ServerConfig())
    assert (server.replicas, server.listen_engines) == (0, "127.0.0.1:0")
    assert server.engine_key is not None
    assert len(server.engine_key) == 64
    assert server.engine_key != for_ray(ServerConfig()).engine_key
    given = ServerConfig(listen_engines="0.0.0.0:7500", engine_key_file="key")
    assert for_ray(given).listen_engines == "0.0.0.0:7500"
    assert for_ray(given).engine_key is None
    with pytest.raises(ConfigError, match="replicas is 3"):
        for_ray(ServerConfig(replicas=3))


def test_a_certificate_is_handed_over_without_its_key(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    cert = (TLS / "cert.pem").read_text()
    both.write_text((TLS / "key.pem").read_text() + cert)
    assert certificates(str(both)).strip() == cert.strip()
    with pytest.raises(ConfigError, match="cannot read the certificate"):
        certificates(str(tmp_path / "none.pem"))


def test_options_of_ray_are_options_of_serve(tmp_path: Path) -> None:
    file = tmp_path / "headway.toml"
    file.write_text('[ray]\nray = "10.0.0.1:6379"\nray_min = 2\n')
    command = [sys.executable, "-m", "headway.cli.main", "serve", "--config", str(file), "--print-config"]
    environ = {**os.environ, "HEADWAY_RAY_MAX": "4"}
    done = subprocess.run([*command, "--ray-cpus", "3"], capture_output=True, text=True, check=True, env=environ)
    for name, value in {"ray": "10.0.0.1:6379", "ray_min": 2, "ray_max": 4, "ray_cpus": 3.0}.items():
        assert f"\n{name} = {json.dumps(value)}" in done.stdout
    done = serve("--ray", "auto", "--ray-min", "3", "--ray-max", "2")
    assert done.returncode == 2
    assert "ray_max is 2; allowed: ray_min, which is 3" in done.stderr
