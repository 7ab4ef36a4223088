"""One model computed by several processes: the engine's answers are those of one process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, SamplingParams
from headway.errors import ConfigError, EngineDead
from processes import children_of, command_of
from raw_http import call
from server_process import wait_ready
from tiny_dir import tiny_options, write_tiny_model

PROMPTS = ["one two three", "a", "the quick brown fox " * 6, "one two four"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=3),
    SamplingParams(temperature=1.0, seed=3, max_tokens=30, n=3, presence_penalty=0.5),
    SamplingParams(temperature=0.8, seed=4, top_p=0.9, max_tokens=20, logit_bias={5: 2.0}),
    SamplingParams(temperature=0, max_tokens=40),
]


def answers(folder: Path, **options: object) -> Any:
    with LLM(**tiny_options(folder, dtype="float32", **options)) as llm:  # type: ignore[arg-type]
        found = llm.generate(PROMPTS, PARAMS)
    return [[(each.token_ids, each.logprobs, each.finish_reason) for each in one.outputs] for one in found]


def followers(pid: int | None = None) -> list[int]:
    """Processes below this one, or below another, that follow an engine."""
    found = []
    for child in children_of(pid or os.getpid()):
        if "headway.backends.follower" in command_of(child):
            found.append(child)
        found += followers(child)
    return found


@pytest.mark.parametrize("kernels", ["ref", "auto"])
@pytest.mark.parametrize("depth", [{}, {"depth": 2}], ids=["depth1", "depth2"])
def test_two_processes_give_the_tokens_and_logprobs_of_one(tmp_path: Path, kernels: str, depth: dict[str, int]) -> None:
    write_tiny_model(tmp_path)
    alone = answers(tmp_path, kernels=kernels)
    few = answers(tmp_path, kernels=kernels, tensor_parallel=2, num_blocks=14, max_model_len=200, **depth)  # preempts
    assert few == alone
    assert followers() == []


def test_a_follower_that_is_killed_ends_the_engine(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with LLM(**tiny_options(tmp_path, dtype="float32", tensor_parallel=2)) as llm:  # type: ignore[arg-type]
        (pid,) = followers()
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        with pytest.raises(EngineDead):
            llm.generate(PROMPTS, PARAMS)


def test_answers_go_on_when_a_follower_behind_a_server_is_killed(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    options = ["--tensor-parallel", "2", "--threads", "1", "--num-blocks", "400", "--dtype", "float32"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "headway.cli.main", "serve", str(tmp_path / "tiny"), "--port", str(port), *options]
    body = {"model": "tiny", "prompt": "one two", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command) as server:
        try:
            wait_ready(url, server)
            before = call(url, "POST", "/v1/completions", body)
            assert before[0] == 200, before
            (pid,) = followers(server.pid)
            timer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
            timer.start()
            after = call(url, "POST", "/v1/completions", body)
            timer.join()
            assert after[0] == 200, after
            assert after[1]["choices"][0]["text"] == before[1]["choices"][0]["text"]
            again = call(url, "POST", "/v1/completions", body)
            assert again[1]["choices"][0]["text"] == before[1]["choices"][0]["text"]
            (other,) = followers(server.pid)
            assert other != pid
        finally:
            server.terminate()
    assert followers() == []


def test_what_cannot_be_spread_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel is 3; this model has 2 key heads"):
        LLM(**tiny_options(tmp_path, tensor_parallel=3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tensor_parallel is 2 with device 'cuda'"):
        LLM(**tiny_options(tmp_path, tensor_parallel=2, device="cuda"))  # type: ignore[arg-type]
    assert followers() == []
