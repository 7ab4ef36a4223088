"""guidellm: chat and text completions, four at a time, streamed and not."""

from __future__ import annotations

import json

from report import Target, command, passed, require, say_version, target

NUM_REQUESTS = 8
NUM_TOKENS = 16  # of every answer: guidellm sends ignore_eos


def benchmark(server: Target, what: str, path: str, is_streamed: bool) -> None:
    result = server.scratch / "result.json"
    backend = f"kind=openai_http,target={server.url},request_format={path},stream={str(is_streamed).lower()}"
    command(
        [
            "guidellm",
            "run",
            *("--backend", backend),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={server.tokenizer}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_TOKENS}"),
            *("--output", f"kind=json,path={result}"),
            "--disable-console-interactive",
        ]
    )
    (found,) = json.loads(result.read_text())["benchmarks"]
    state, requests = found["scheduler_state"], found["requests"]
    ended = (state["successful_requests"], state["errored_requests"], state["cancelled_requests"])
    require(ended == (NUM_REQUESTS, 0, 0), f"{what}: {ended} requests succeeded, failed, were cancelled")
    for request in requests["successful"]:
        counted = request["output_metrics"]["text_tokens"]
        require(counted == NUM_TOKENS, f"{what}: an answer has {counted} tokens")
        require(request["output"], f"{what}: an answer has no text")
        require(request["input_metrics"]["text_tokens"] >= 64, f"{what}: a prompt has no tokens")
    if is_streamed:
        ttft_ms = found["metrics"]["time_to_first_token_ms"]["successful"]["mean"]
        itl_ms = found["metrics"]["inter_token_latency_ms"]["successful"]["mean"]
        require(ttft_ms > 0 and itl_ms > 0, f"{what}: TTFT {ttft_ms} ms, ITL {itl_ms} ms")
    passed(f"{what}: {NUM_REQUESTS} of {NUM_REQUESTS}")


def main() -> None:
    server = target()
    say_version("guidellm")
    for name, path in (("chat", "/v1/chat/completions"), ("completions", "/v1/completions")):
        benchmark(server, f"{name}, streamed", path, True)
        benchmark(server, name, path, False)


if __name__ == "__main__":
    main()
