"""`vllm bench serve`: its backends for chat and text completions, which stream, four requests at a time."""

from __future__ import annotations

import json

from report import Target, command, passed, require, say_version, target

NUM_REQUESTS = 8
NUM_TOKENS = 16  # of every answer: --ignore-eos


def benchmark(server: Target, what: str, backend: str, path: str) -> None:
    command(
        [
            "vllm",
            "bench",
            "serve",
            *("--backend", backend, "--base-url", server.url, "--endpoint", path),
            *("--model", server.model, "--tokenizer", server.tokenizer),
            *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", str(NUM_TOKENS)),
            *("--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "4", "--ignore-eos"),
            *("--save-result", "--save-detailed"),
            *("--result-dir", server.scratch, "--result-filename", "result.json"),
        ]
    )
    found = json.loads((server.scratch / "result.json").read_text())
    require(found["completed"] == NUM_REQUESTS, f"{what}: {found['completed']} of {NUM_REQUESTS} completed")
    require(not any(found["errors"]), f"{what}: {found['errors']}")
    require(found["output_lens"] == [NUM_TOKENS] * NUM_REQUESTS, f"{what}: lengths {found['output_lens']}")
    require(all(found["generated_texts"]), f"{what}: an answer has no text")
    require(found["mean_ttft_ms"] > 0 and found["mean_itl_ms"] > 0, f"{what}: no times")
    passed(f"{what}: {NUM_REQUESTS} of {NUM_REQUESTS}")


def main() -> None:
    server = target()
    say_version("vllm")
    benchmark(server, "openai-chat, streamed", "openai-chat", "/v1/chat/completions")
    benchmark(server, "openai, streamed", "openai", "/v1/completions")


if __name__ == "__main__":
    main()
