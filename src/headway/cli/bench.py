"""`headway bench`: everything that measures. Owns the flags; the measuring is in `headway.bench`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from cyclopts import App

from headway.cli import bench_serve
from headway.cli.args import Switch
from headway.cli.help import HELP_FLAGS
from headway.cli.model_choice import DEFAULTS, Choices, ModelFlags
from headway.errors import ConfigError
from headway.extras import require_torch

EXAMPLES = """Examples:
  headway bench offline --requests 64 --dtype float32 --json
  headway bench offline --workload bimodal --engine continuous,static32,naive --dtype float32
  headway bench kernels
  headway bench serve --rounds 3"""
OFFLINE_EXAMPLES = """Examples:
  headway bench offline --requests 32 --dtype float32 --rounds 3 --json | tail -1
  headway bench offline --workload bimodal --engine continuous,static32,naive --dtype float32
  headway bench offline --requests 1 --dtype int8 --kv-dtype fp16"""
PAGING_EXAMPLES = """Examples:
  headway bench paging --dtype float32 --json | tail -1"""
KERNELS_EXAMPLES = """Examples:
  headway bench kernels
  headway bench kernels --dtype int8 --json | tail -1
  headway bench kernels --device cuda --model-shape llama-3.1-8b"""
STARTUP_EXAMPLES = """Examples:
  headway bench startup
  headway bench startup --dtype int8 --rounds 5 --json | tail -1"""
QUALITY_EXAMPLES = """Examples:
  headway bench quality --text book.txt --dtype int8,q4
  headway bench quality --text book.txt --device cuda
  headway bench quality --text squad.json --dtype float32 --kv-dtype fp16,int8 --tokens 8000 --json"""
SCHEDULER_EXAMPLES = """Examples:
  headway bench scheduler
  headway bench scheduler --case steady --case feedback --policy sjf --policy fcfs
  headway bench scheduler --case common-prefix --json | tail -1"""
POLICY_EXAMPLES = """Examples:
  headway bench policy --clock virtual
  headway bench policy --policy sjf --policy my_policies.short:PLUGIN --case overload
  headway bench policy --clock real --case order --rounds 3
  headway bench policy --case overload --case fairness --seed 7 --json | tail -1"""
KV_EXAMPLES = """Examples:
  headway bench kv
  headway bench kv --json | tail -1"""
DEPTH_EXAMPLES = """Examples:
  headway bench depth
  headway bench depth --requests 64 --rounds 5 --json | tail -1"""
DECODING_EXAMPLES = """Examples:
  headway bench decoding
  headway bench decoding --dtype int8 --rounds 7 --json | tail -1"""
ROUTE_EXAMPLES = """Examples:
  headway bench route
  headway bench route --route my_routes:Nearest --json | tail -1"""


def create_app() -> App:
    app = App(
        name="bench", help="Measure headway on this machine.", help_epilogue=EXAMPLES, help_flags=HELP_FLAGS, sort_key=6
    )
    app.command(offline, help_epilogue=OFFLINE_EXAMPLES)
    app.command(paging, help_epilogue=PAGING_EXAMPLES)
    app.command(kernels, help_epilogue=KERNELS_EXAMPLES)
    app.command(startup, help_epilogue=STARTUP_EXAMPLES)
    app.command(bench_serve.serve, help_epilogue=bench_serve.EXAMPLES)
    app.command(quality, help_epilogue=QUALITY_EXAMPLES)
    app.command(scheduler, help_epilogue=SCHEDULER_EXAMPLES)
    app.command(policy, help_epilogue=POLICY_EXAMPLES)
    app.command(kv, help_epilogue=KV_EXAMPLES)
    app.command(depth, help_epilogue=DEPTH_EXAMPLES)
    app.command(decoding, help_epilogue=DECODING_EXAMPLES)
    app.command(route, help_epilogue=ROUTE_EXAMPLES)
    return app


def offline(
    *,
    workload: str = "chat-mix",
    requests: int | None = None,
    seed: int = 0,
    engine: str = "continuous",
    slots: int | None = None,
    rounds: int = 1,
    contiguous: Switch = False,
    json: Switch = False,
    choices: ModelFlags = DEFAULTS,
) -> int:
    """Output tokens per second without a server, beside the machine's limit and simpler engines.

    Parameters
    ----------
    workload
        chat-mix, bimodal or uniform.
    requests
        How many, all submitted at the start; 32 of chat-mix, 160 of the others if not given.
    seed
        Of the workload: equal seeds, equal lengths.
    engine
        continuous, naive (one at a time), static8 (batches of 8), static32, ...; several with commas take turns.
    slots
        Requests that run at once; all of chat-mix up to 256, 32 of the others if not given.
    rounds
        Runs of each engine; the median counts.
    contiguous
        One block per request, as a cache without paging has it.
    json
        End with one line of JSON.
    """
    from headway.bench.offline import run  # imports the engine, which takes a moment

    return run(
        choices.setup(),
        workload=workload,
        requests=requests,
        seed=seed,
        engine=engine,
        slots=slots,
        rounds=rounds,
        is_contiguous=contiguous,
        as_json=json,
    )


def paging(
    *, tokens: int = 256, rounds: int = 3, seed: int = 0, json: Switch = False, choices: ModelFlags = DEFAULTS
) -> int:
    """What paging costs a single request: blocks of 16 against one block for the whole request, taking turns.

    Parameters
    ----------
    tokens
        Length of the answer.
    rounds
        Answers of each; the median of all steps counts.
    seed
        Of the prompt.
    json
        End with one line of JSON that holds the medians.
    """
    from headway.bench.paging import run  # imports the engine, which takes a moment

    return run(choices.setup(), tokens=tokens, rounds=rounds, seed=seed, as_json=json)


def kernels(
    *, device: str = "cpu", model_shape: str | None = None, json: Switch = False, choices: ModelFlags = DEFAULTS
) -> int:
    """Products and attention in the model's shapes, against the machine's measured peak and torch's own.

    Without --dtype every installed number format is measured. On a CUDA device: each kernel of decode steps of one row
    to 1,000, its share and how near it is to its limit, with made-up weights.

    Parameters
    ----------
    device
        cpu or cuda.
    model_shape
        On a CUDA device, the sizes of a well-known model; llama-3.2-1b if not given.
    json
        End with one line of JSON that holds every table cell.
    """
    require_torch("bench kernels, which compares with torch,")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; allowed: cpu, cuda")
    if device == "cuda":
        return _cuda_kernels(model_shape or "llama-3.2-1b", choices, json)
    if model_shape is not None:
        raise ConfigError("--model-shape is for --device cuda; name a model by --model")
    from headway.bench.kernels import run  # imports torch, which takes a second

    return run(choices.setup(), as_json=json)


def _cuda_kernels(shape: str, choices: Choices, as_json: bool) -> int:
    others = {name for name, value in asdict(choices).items() if value is not None} - {"dtype", "kv_dtype"}
    if others:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(others))
        raise ConfigError(f"{given}: not for --device cuda, which takes --model-shape, --dtype and --kv-dtype")
    from headway.backends.cuda import open_device, resolve_dtypes

    open_device()  # says why there is none, before anything needs Triton
    dtype, kv_dtype = resolve_dtypes(choices.dtype or "auto", choices.kv_dtype or "auto")
    from headway.bench.device_kernels import run

    return run(shape, dtype=dtype, kv_dtype=kv_dtype, as_json=as_json)


def _cuda_quality(choices: Choices, **more: Any) -> int:
    others = {name for name, value in asdict(choices).items() if value is not None} - {"model", "cache_dir"}
    if others:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(others))
        raise ConfigError(f"{given}: not for --device cuda, where every pair of formats is measured")
    require_torch("device = cuda", extra="cuda")
    from headway.backends.cuda import open_device

    open_device()  # says why there is none, before anything needs Triton
    from headway.bench.device_quality import run

    return run(choices.setup(), **more)


def startup(*, rounds: int = 3, json: Switch = False, choices: ModelFlags = DEFAULTS) -> int:
    """Seconds until `headway serve` is ready and its memory then, with an empty cache and with a full one.

    The cache is a temporary folder; your own is not touched.

    Parameters
    ----------
    rounds
        Starts of each; the medians count.
    json
        End with one line of JSON that holds every start.
    """
    from headway.bench.startup import run  # imports the engine, which takes a moment

    return run(choices.setup(), rounds=rounds, as_json=json)


def quality(
    *,
    text: Path,
    tokens: int = 20_000,
    window: int = 1024,
    device: str = "cpu",
    json: Switch = False,
    choices: ModelFlags = DEFAULTS,
) -> int:
    """Perplexity of number formats over a text, and how often they agree with float32 on the most likely token.

    --dtype and --kv-dtype may name several formats with commas; every combination is measured beside float32. On a CUDA
    device its formats of a byte are, each beside bfloat16.

    Parameters
    ----------
    text
        A UTF-8 text, or a .json file in the form of SQuAD, whose contexts are read in order, each once.
    tokens
        Take so many from the beginning.
    window
        Start from an empty context after so many.
    device
        cpu or cuda.
    json
        End with one line of JSON that holds every row.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; allowed: cpu, cuda")
    if device == "cuda":
        return _cuda_quality(choices, text=text, tokens=tokens, window=window, as_json=json)
    from headway.bench.quality import run  # imports the engine, which takes a moment

    return run(choices.setup(), text=text, tokens=tokens, window=window, as_json=json)


def scheduler(*, case: list[str] | None = None, policy: list[str] | None = None, json: Switch = False) -> int:
    """Cost of schedule() and commit() per step, over running rows, queue depths and policies.

    Parameters
    ----------
    case
        steady, common-prefix (20,000 waiting requests share one) or feedback (1,000 rows that need feedback); may be
        given several times. steady if not given.
    policy
        Only this policy, or my.module:Thing; may be given several times. All of them, and lanes, if not given.
    json
        End with one line of JSON that holds every row.
    """
    from headway.bench.scheduler_cases import run  # benchmarks are not needed to print help

    return run(case or ("steady",), as_json=json, policies=policy)


def policy(
    *,
    policy: list[str] | None = None,
    clock: str = "virtual",
    case: list[str] | None = None,
    seed: int = 0,
    rounds: int = 3,
    json: Switch = False,
    choices: ModelFlags = DEFAULTS,
) -> int:
    """Effects of policies under load, each claim with its bar; ends with status 1 if one does not hold.

    By the virtual clock, which only a cost model moves, the production scheduler and loop compute nothing, and equal
    seeds print equal bytes. By the real one the model is served, setups take turns, and medians count. With --policy
    there are no claims: these policies, and fcfs, serve the same requests by the virtual clock, and a table compares.

    Parameters
    ----------
    policy
        Compare this policy, or my.module:Thing, with fcfs; may be given several times.
    clock
        virtual or real.
    case
        Only this case; may be given several times. All of them if not given. By the virtual clock: fixture, slots,
        overload, bursts, pauses, impossible, starvation, fairness, preemption, declared, prefix, harm, itl, ttft, deep;
        by the real one: order, itl, harm; with --policy: steady, overload, bursts.
    seed
        Of lengths and arrivals.
    rounds
        Runs of each setup by the real clock; the medians count.
    json
        End with one line of JSON that holds every claim, or every row of the table.
    """
    from headway.bench.policy import compare, run  # benchmarks are not needed to print help

    if policy:
        if clock != "virtual" or choices != DEFAULTS:
            raise ConfigError("--policy compares by the virtual clock, which takes no model; leave out what is of it")
        return compare.run(policy, case or (), seed=seed, as_json=json)
    setup = None if choices == DEFAULTS else choices.setup()
    return run.run(case or (), seed=seed, clock=clock, as_json=json, rounds=rounds, setup=setup)


def kv(*, json: Switch = False) -> int:
    """Waste of the paged KV cache, swept over block sizes.

    Parameters
    ----------
    json
        End with one line of JSON that holds every row.
    """
    from headway.bench.kv import run  # benchmarks are not needed to print help

    return run(as_json=json)


def depth(*, requests: int = 32, rounds: int = 3, seed: int = 0, json: Switch = False) -> int:
    """Throughput of the embedded model at overlap depth 1 and 2, interleaved.

    Parameters
    ----------
    requests
        Requests of each run, all submitted at the start.
    rounds
        Runs of each depth; the median counts.
    seed
        Of the workload: equal seeds, equal lengths.
    json
        End with one line of JSON that holds the medians.
    """
    from headway.bench.depth import run  # imports the engine, which takes a moment

    return run(as_json=json, requests=requests, rounds=rounds, seed=seed)


def decoding(
    *,
    case: list[str] | None = None,
    rounds: int = 5,
    draft_model: str | None = None,
    json: Switch = False,
    choices: ModelFlags = DEFAULTS,
) -> int:
    """Ways of decoding against plain decoding of the same model, taking turns.

    Parameters
    ----------
    case
        grammar: half of 32 rows are held to a JSON schema. speculation: edits, quotations, chat, with guessed tokens.
        verify: a step of 4 tokens of one row behind 1,500. adapters: 8 rows with
        one adapter or 8. May be given several times; all of them if not given.
    rounds
        Runs of each; the medians count.
    draft_model
        A small model that guesses tokens in the case speculation; by what followed before if not given.
    json
        End with one line of JSON.
    """
    from headway.bench.decoding import CASES, run  # imports the engine, which takes a moment

    return run(choices.setup(), case=case or CASES, rounds=rounds, draft_model=draft_model, as_json=json)


def route(*, route: str = "cost", seed: int = 0, json: Switch = False) -> int:
    """What a front pays for choosing a replica: time of a choice and memory of the index of blocks.

    Parameters
    ----------
    route
        Its name, or my.module:Thing.
    seed
        Of prompts, loads and holders.
    json
        End with one line of JSON.
    """
    from headway.bench.route import run  # benchmarks are not needed to print help

    return run(route=route, seed=seed, as_json=json)
