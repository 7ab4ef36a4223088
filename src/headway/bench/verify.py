"""`headway verify`: is a model computed right, and does an answer depend on what else the engine is doing?

Against transformers, in float32: greedy tokens, and the largest error of a logit. Against headway itself, in the number
formats that are served: every bit of every logit, alone and in company, with chunked prefill, a cached prefix and
forced preemptions. One line per check; the exit status is 1 if anything differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from headway.backends.cpu import LoadedCpu, load_model
from headway.bench import reference
from headway.bench.console import print_json, print_table, progress
from headway.bench.recorder import LogitRecorder, Logits
from headway.bench.setup import ModelSetup, at_least_one, describe
from headway.build import build_engine
from headway.core.preemption import preempt
from headway.engine.client import Submit
from headway.engine.engine import Engine
from headway.errors import ConfigError, RowFailed
from headway.text.tokenizer import Tokenizer
from headway.values.params import SamplingParams

BLOCK_SIZE = 16
SHORTEST, LONGEST = 2 * BLOCK_SIZE + 1, 96  # tokens of a prompt: with two full blocks there is something to cache
COMPANY = 12  # other requests
BAR = 1e-4  # largest error of a logit, as a share of the largest logit
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "Write a haiku about a train that never stops at night.",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Explain to a ten-year-old why the sky is blue, in three short sentences.",
    "List five things to pack for a week in the mountains: 1. a tent, 2. a map, 3.",
    "Es war einmal ein König, der hatte drei Töchter; die jüngste aber",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "city":',
)


@dataclass(frozen=True, slots=True)
class Way:
    """A way of running the prompts whose logits must be those of each prompt alone."""

    name: str
    company: int = 0
    chunk: int | None = None
    is_cached: bool = False  # a second pass over the same prompts, which then finds them
    preempts: bool = False
    depth: int = 1


ALONE = Way("alone")
WAYS = (
    Way("alone again"),
    Way("in company", company=COMPANY),
    Way("chunked prefill", chunk=7),
    Way("prefix cached", is_cached=True),
    Way("preempted", company=COMPANY, preempts=True),
    Way("all at once", COMPANY, 7, is_cached=True, preempts=True, depth=2),
)


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One line of the table."""

    check: str
    compared: str
    differing: int
    verdict: str
    max_error: float | None = None  # of a logit, where errors are compared and not bits


def run(setup: ModelSetup, *, against: str | None, prompts: int, tokens: int, as_json: bool = False) -> int:
    """Print the table; 1 if a token or a bit differs, or a logit by more than the bar.

    With `against` None transformers is compared where it is installed.
    """
    at_least_one(prompts=prompts, tokens=tokens)
    if against not in (None, "transformers", "none"):
        raise ConfigError(f"against is {against!r}; allowed: transformers, none")
    if against == "transformers" and (lacks := _lacks()):
        raise ConfigError(
            f"against is {against!r}, but {lacks}; install it by pip, or leave --against out to run the rest"
        )
    config = setup.config()
    loaded = load_model(config)
    asked = make_prompts(loaded, prompts, tokens)
    rows = [] if against == "none" else list(against_transformers(setup, loaded, asked, tokens))
    rows += against_itself(setup, loaded, asked, tokens)
    facts = describe(loaded, config)
    title = (
        f"{facts['model']}: {facts['dtype']} weights, {facts['kv_dtype']} KV, {facts['kernels']} kernels; "
        f"{prompts} prompts, {tokens} tokens each"
    )
    print_table(
        ("check", "compared", "differing", "verdict"),
        [(r.check, r.compared, "" if r.compared == "nothing" else r.differing, r.verdict) for r in rows],
        title,
    )
    if as_json:
        print_json(facts | {"prompts": prompts, "tokens": tokens, "rows": [asdict(row) for row in rows]})
    return 1 if any(row.differing for row in rows) else 0


def make_prompts(loaded: LoadedCpu, count: int, max_tokens: int) -> list[list[int]]:
    """Texts of several kinds, cut to uneven lengths that leave room for an answer."""
    room = loaded.spec.max_len - max_tokens
    if room < SHORTEST:
        raise ConfigError(
            f"tokens is {max_tokens}; this model's context of {loaded.spec.max_len} leaves room for "
            f"at most {loaded.spec.max_len - SHORTEST}"
        )
    tokenizer, vocab = Tokenizer.open(loaded.source.tokenizer_path()), loaded.spec.vocab_size
    made = []
    for index in range(count):
        text = " ".join(TEXTS[(index + place) % len(TEXTS)] for place in range(len(TEXTS)))
        ids = [token for token in tokenizer.encode(text) if token < vocab]
        length = min(room, SHORTEST + 17 * index % (LONGEST - SHORTEST + 1))
        more = ((7 * index + 3 * place) % vocab for place in itertools.count())  # a vocabulary may know few words
        made.append([*ids, *itertools.islice(more, length)][:length])
    return made


def against_transformers(
    setup: ModelSetup, loaded: LoadedCpu, asked: Sequence[Sequence[int]], max_tokens: int
) -> Iterator[VerifyRow]:
    """Greedy tokens and logits of the prompts alone, with float32 weights and KV."""
    if lacks := _lacks():
        yield VerifyRow("transformers", "nothing", 0, f"not run: {lacks}")
        return
    exact = replace(setup, dtype="float32", kv_dtype="float32")
    try:
        model = reference.Reference(loaded.source.config, loaded.source.tensors())
    except ConfigError as error:
        yield VerifyRow("transformers", "nothing", 0, f"not run: {error}")
        return
    mine = loaded if loaded.device.dtype == "float32" else load_model(exact.config())
    num_wrong = num_off = num_rows = 0
    largest = 0.0
    with progress("against transformers", len(asked)) as update:
        for done, prompt in enumerate(asked, 1):
            tokens, logits = model.answer(prompt, max_tokens)
            noted: dict[int, Logits] = {}  # by place in the answer
            (answer,) = _answers(exact, mine, ALONE, [prompt], max_tokens, {}, noted).answers
            num_wrong += sum(a != b for a, b in zip(answer, tokens, strict=True))
            for place in range(max_tokens):
                if answer[:place] != tokens[:place]:
                    break  # what follows answers another text
                off = float(np.abs(noted[place] - logits[place]).max())
                bar = BAR * max(1.0, float(np.abs(logits[place]).max()))
                num_rows, num_off, largest = num_rows + 1, num_off + (not off <= bar), max(largest, off)
            update(done)
    yield VerifyRow("transformers tokens", f"{len(asked) * max_tokens} tokens", num_wrong, _verdict(num_wrong))
    verdict = f"{'DIFFERS, ' if num_off else ''}largest error {largest:.1e}"
    yield VerifyRow("transformers logits", f"{num_rows} logit rows", num_off, verdict, largest)


def _lacks() -> str:
    """What keeps transformers from being compared; empty if nothing does."""
    missing = reference.missing()
    return f"{missing} {'are' if ' and ' in missing else 'is'} not installed" if missing else ""


def against_itself(
    setup: ModelSetup, loaded: LoadedCpu, asked: Sequence[Sequence[int]], max_tokens: int
) -> Iterator[VerifyRow]:
    """Every logit's bits and every token in all ways of running, held against each prompt alone."""
    digests: dict[bytes, bytes] = {}
    expected = _answers(setup, loaded, ALONE, asked, max_tokens, digests).answers
    with progress("against itself", len(WAYS)) as update:
        for done, way in enumerate(WAYS, 1):
            got = _answers(setup, loaded, way, asked, max_tokens, digests)
            num_wrong = sum(
                a != b for one, want in zip(got.answers, expected, strict=True) for a, b in zip(one, want, strict=True)
            )
            num_wrong += len(got.recorder.mismatches) + got.recorder.num_wrong_picks
            verdict = _verdict(num_wrong) if got.is_reached or num_wrong else "not reached"
            yield VerifyRow(way.name, f"{got.recorder.num_rows} logit rows", num_wrong, verdict)
            update(done)


@dataclass(frozen=True, slots=True)
class _Outcome:
    answers: list[list[int]]
    recorder: LogitRecorder
    is_reached: bool  # what the way is about did happen


def _answers(
    setup: ModelSetup,
    loaded: LoadedCpu,
    way: Way,
    asked: Sequence[Sequence[int]],
    max_tokens: int,
    digests: dict[bytes, bytes],
    noted: dict[int, Logits] | None = None,
) -> _Outcome:
    """The greedy answers of this way; `noted` takes the logits of a single prompt's answer."""

    def note(prefix: list[int], logits: Logits) -> None:
        if noted is not None and len(prefix) >= len(asked[0]):
            noted[len(prefix) - len(asked[0])] = logits.copy()

    requests = [*asked, *_fillers(loaded.spec.vocab_size, way.company, loaded.spec.max_len - max_tokens)]
    need = sum(-(-(len(prompt) + max_tokens) // BLOCK_SIZE) for prompt in requests)
    config = setup.config(
        block_size=BLOCK_SIZE, num_blocks=2 * need + 8 + -(-loaded.spec.max_len // BLOCK_SIZE),
        prefix_caching=way.is_cached, max_chunk_tokens=way.chunk, max_num_batched_tokens=1024,
        max_num_seqs=len(requests), depth=way.depth,
    )  # fmt: skip
    recorder = LogitRecorder(loaded.decoder, digests, note)
    engine = build_engine(config, replace(loaded, decoder=recorder), keeps_tokens=True)
    recorder.watch(engine)
    try:
        for _ in range(2 if way.is_cached else 1):
            if way.company:
                answers = _drive(engine, requests, max_tokens, way.preempts)[: len(asked)]
            else:
                answers = [_drive(engine, [prompt], max_tokens, way.preempts)[0] for prompt in asked]
        stats = engine.stats()
        is_reached = (
            (not way.company or recorder.max_batch > 1)
            and (not way.is_cached or stats.tokens_cached > 0)
            and (not way.preempts or stats.preemptions > 0)
        )
        return _Outcome(answers, recorder, is_reached)
    finally:
        engine.close()


def _drive(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, preempts: bool) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for id, prompt in enumerate(prompts):
        engine.add(Submit(id, prompt, params))
    answers: dict[int, list[int]] = {}
    for step in itertools.count():
        if not engine.has_work:
            break
        for output in engine.step().finished:
            if output.error is not None:
                raise RowFailed(output.error)
            answers[output.id] = list(output.tokens)
        # Twice each, in prefill or later: for ever would keep a long prompt from ever being done.
        running = [req for req in engine.scheduler.state.rows.running() if req.num_preempted < 2]
        if preempts and step % 2 and running:
            preempt(engine.scheduler.state, running[step // 2 % len(running)])
    return [answers[id] for id in range(len(prompts))]


def _fillers(vocab: int, count: int, room: int) -> list[list[int]]:
    """Other requests of uneven length."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab, min(room, 5 + 13 * i % 90)).tolist() for i in range(1, count + 1)]


def _verdict(num_wrong: int) -> str:
    return "DIFFERS" if num_wrong else "equal"
