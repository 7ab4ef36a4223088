"""`headway serve` as processes around an echo engine, for tests of process ids, signals and limits of the system."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import echo_child
from processes import children_of, command_of
from raw_http import call
from serve_harness import model_directory

CHILD = str(Path(echo_child.__file__))
SCRIPT = """
import json, sys
from headway.config import EngineConfig, ServeConfig, ServerConfig
from headway.serve.run import run
model, engine, server, child = sys.argv[1:]
engine = EngineConfig.of(model=model, **json.loads(engine))
sys.exit(run(ServeConfig(engine, ServerConfig(**json.loads(server))), command=(child,)))
"""


class ServerProcess:
    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    def children(self) -> list[int]:
        return children_of(self.process.pid)

    def engine(self) -> int:
        """Its process id."""
        return next(pid for pid in self.children() if "echo_child" in command_of(pid))

    def metric(self, name: str) -> float:
        page = call(self.url, "GET", "/metrics")[1].decode()
        found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
        assert found, name
        return float(found[1])


def words(folder: Path, *, engine: dict[str, object] | None = None, **server: object) -> list[str]:
    """The command line of a server whose model is made in `folder`."""
    model = folder / "echo"
    if not model.exists():
        model_directory(model)
    return [sys.executable, "-c", SCRIPT, str(model), json.dumps(engine or {}), json.dumps(server), CHILD]


@contextmanager
def server_process(
    folder: Path,
    shell: str = 'exec "$@"',
    *,
    engine: dict[str, object] | None = None,
    streams: dict[str, int] | None = None,
    **server: object,
) -> Iterator[ServerProcess]:
    """A server that was started by these words of a shell, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = ["sh", "-c", shell, "sh", *words(folder, engine=engine, port=port, **server)]
    with subprocess.Popen(command, **(streams or {})) as process:  # type: ignore[call-overload]
        try:
            wait_ready(f"http://127.0.0.1:{port}", process)
            yield ServerProcess(process, f"http://127.0.0.1:{port}")
        finally:
            process.kill()


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until it takes requests; AssertionError if it has ended."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server has ended"
        try:
            if call(url, "GET", "/ready", timeout_s=5)[0] == 200:
                return
        except OSError:
            time.sleep(0.02)  # it does not listen yet
    raise AssertionError("the server did not get ready")
