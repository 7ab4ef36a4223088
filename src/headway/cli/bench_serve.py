"""`headway bench serve`: flags of what is sent to a server; the measuring is in `headway.bench`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from cyclopts import Parameter

from headway.cli.args import Switch
from headway.cli.model_choice import DEFAULTS, ModelFlags
from headway.errors import ConfigError

EXAMPLES = """Examples:
  headway bench serve --rounds 3 --json | tail -1
  headway bench serve --url http://127.0.0.1:8000/v1 --streams 8 --requests 64
  headway bench serve --url http://box:9000/v1 --model NAME --slo-ttft-ms 500"""


@dataclass(frozen=True, slots=True)
class Sent:
    """What is sent, and what is asked of the answers."""

    workload: str = "chat-mix"
    """chat-mix, bimodal or uniform."""
    requests: int = 32
    """How many in each round."""
    streams: int = 32
    """How many of them at a time."""
    rounds: int = 3
    """Runs, all of which count for the percentiles; of tokens per second the median does."""
    seed: int = 0
    """Of the workload: equal seeds, equal lengths."""
    slo_ttft_ms: float = 1000.0
    """Goodput is the share of requests with at most this TTFT and at most the mean ITL of --slo-itl-ms."""
    slo_itl_ms: float = 100.0
    """See --slo-ttft-ms."""


def serve(
    *,
    url: str | None = None,
    api_key: str | None = None,
    endpoint: Literal["chat", "completions"] = "chat",
    extra_body: str | None = None,
    sent: Annotated[Sent, Parameter(name="*")] = Sent(),
    json: Switch = False,
    choices: ModelFlags = DEFAULTS,
) -> int:
    """TTFT, ITL and E2E percentiles, goodput and tokens per second over HTTP.

    Without --url headway's own server is started, and the same work runs offline beside it. With --url it can be any
    server that speaks OpenAI's API; nothing but standard fields is sent, and --model is the name of one of its models.

    Parameters
    ----------
    url
        Send requests to this server, such as http://127.0.0.1:8000/v1.
    api_key
        The key it asks for.
    endpoint
        With --url: chat sends to /v1/chat/completions, completions to /v1/completions.
    extra_body
        With --url: a JSON object of fields that every request has too, such as {"ignore_eos": true}.
    json
        End with one line of JSON.
    """
    from headway.bench.latency import Objectives  # benchmarks are not needed to print help

    objectives = Objectives(sent.slo_ttft_ms, sent.slo_itl_ms)
    load = (sent.workload, sent.requests, sent.streams, sent.rounds, sent.seed)
    if url is not None:
        from headway.bench.any_server import UrlLoad, run_url

        if replace(choices, model=None) != DEFAULTS:
            raise ConfigError(
                "with --url the server has a model and options of its own; of these only --model is taken"
            )
        asked = UrlLoad(*load, endpoint, extra_body)
        return run_url(url, asked, model=choices.model, api_key=api_key, objectives=objectives, as_json=json)
    if extra_body is not None:
        raise ConfigError("extra_body is for a server that is named with --url")
    from headway.bench.serve import run  # imports the engine, which takes a moment

    return run(choices.setup(), *load, objectives, as_json=json)
