"""Many short requests of every kind on a CUDA device: all memory comes back, and answers do not depend on others.

    python tools/gpu_soak.py --model GGUF            10,000 requests in a pool of half the memory, twice, 500 alone
    python tools/gpu_soak.py --model GGUF --dtype fp8 --kv-dtype int8
    python tools/gpu_soak.py --model GGUF --guesses     both runs guess tokens ahead, those alone do not

Requests differ in sampling, penalties, biases, log probabilities, stop tokens and lengths; every tenth shares its
prompt with the one before it, and its KV if that one runs; every ninth has a mask at each position. Some are aborted,
some preempted, by copying to host memory or computing again.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from headway.build import build_engine, load
from headway.config import EngineConfig
from headway.control.costs import CostModel, CostWeights
from headway.core.preemption import preempt
from headway.engine.client import Submit
from headway.engine.engine import Engine
from headway.engine.executor import Capacity, Executor, Late
from headway.engine.speculating import Speculation
from headway.spec.verify_times import MOST_TOKENS, VerifyTimes
from headway.values.params import SamplingParams
from headway.values.plan import StepPlan, StepResult

MAX_TOKENS = 64
_WAITING = 600
# By its own measurements an engine of so small a model copies next to nothing: computing again is as quick.
_COPYING = CostModel(CostWeights(base=1e-3, tokens=1e-3))
_COMPUTING = CostModel(CostWeights(base=1e-3, tokens=1e-9, copies=1.0))


@dataclass(slots=True)
class Outcome:
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    aborted: int = 0
    preempted: int = 0


def request(id: int, vocab: int) -> Submit:
    """The request of that number, always the same."""
    rng = random.Random(id if id % 10 else id - 1)  # every tenth has its predecessor's prompt
    tokens = [rng.randrange(20, vocab) for _ in range(rng.randint(1, 90))]
    rng = random.Random(-id)
    extras = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": rng.randint(1, 80)},
        {"top_p": rng.uniform(0.05, 0.99)},
        {"min_p": rng.uniform(0.0, 0.4), "temperature": 1.4},
        {"repetition_penalty": rng.uniform(0.8, 1.5)},
        {"presence_penalty": rng.uniform(-1, 1), "frequency_penalty": rng.uniform(-1, 1), "temperature": 0.0},
        {"logprobs": rng.randint(0, 5)},
        {"logit_bias": {rng.randrange(vocab): rng.uniform(-20, 20) for _ in range(rng.randint(1, 30))}},
        {"min_tokens": 4, "top_k": 3},
    ]
    stops = tuple(rng.randrange(vocab) for _ in range(rng.randint(0, 40)))
    params = SamplingParams(max_tokens=rng.randint(4, MAX_TOKENS), stop_token_ids=stops, **rng.choice(extras))  # type: ignore[arg-type]
    return Submit(id, tokens, params, seed=rng.getrandbits(63), parent=None if id % 10 else id - 1)


class FreeTokens(VerifyTimes):
    """Draft tokens cost nothing, so that as many as there are guesses are verified."""

    def table(self) -> list[float]:
        return [0.0, *[1.0] * MOST_TOKENS]


class Masking:
    """Passes plans on and supplies them with masks; each is a function of request and position alone."""

    def __init__(self, inner: Executor, vocab: int) -> None:
        self._inner, self._vocab = inner, vocab
        self._rows: dict[int, tuple[int, int]] = {}  # row -> request, tokens that it has
        self._drafted: list[dict[int, int]] = []  # by plan that is not collected: row -> request
        self.num_masks = 0

    def capacity(self) -> Capacity:
        return self._inner.capacity()

    def submit(self, plan: StepPlan) -> None:
        self._rows |= {join.row: (join.id, len(join.tokens)) for join in plan.joins}
        masks = []
        drafts = {chunk.row: chunk.drafts for chunk in plan.chunks if chunk.drafts}
        for row in plan.sampling_rows():
            id, position = self._rows[row]
            mine = drafts.get(row, ())
            if id % 9 == 4:
                masks.append((row, b"".join(self._mask(id, position + i) for i in range(len(mine) + 1))))
            # A row with drafts is in no later plan until its result has said how many tokens it has.
            self._rows[row] = (id, position + (not mine))
        self._drafted.append({row: self._rows[row][0] for row in drafts})
        self.num_masks += len(masks)
        self._inner.supply(plan.id, Late(masks=tuple(masks)))
        self._inner.submit(plan)

    def supply(self, plan_id: int, late: Late) -> None:
        raise AssertionError("an engine has no masks of its own")

    def collect(self) -> StepResult:
        result = self._inner.collect()
        for row, id in self._drafted.pop(0).items():
            if self._rows[row][0] == id:
                self._rows[row] = (id, self._rows[row][1] + result.counts.get(row, 1))
        return result

    def close(self) -> None:
        self._inner.close()

    def _mask(self, id: int, position: int) -> bytes:
        rng = random.Random(id << 20 | position)
        bits = rng.getrandbits(self._vocab) & rng.getrandbits(self._vocab)
        return bits.to_bytes(-(-self._vocab // 8), "little")


def run(engine: Engine, ids: Iterable[int], seed: int, *, has_trouble: bool) -> Outcome:
    """Answer them; with trouble some are aborted, and running ones preempted."""
    rng, outcome, vocab = random.Random(seed), Outcome(), engine.info.vocab_size
    waiting = iter(ids)
    is_open = True
    steps = 0
    while is_open or engine.has_work:
        while is_open and engine.scheduler.num_waiting < _WAITING:
            id = next(waiting, None)
            is_open = id is not None
            if id is not None:
                engine.add(request(id, vocab))
        steps += 1
        for output in engine.step().finished:
            assert output.error is None, output.error
            if output.finish is not None:
                outcome.answers[output.id] = tuple(output.tokens)
        running = engine.scheduler.state.rows.running()
        if has_trouble and running and steps % 3 == 0:
            victim = rng.choice(list(running))
            if steps % 2:
                engine.scheduler.state.costs = rng.choice((_COPYING, _COMPUTING))
                preempt(engine.scheduler.state, victim)
            elif engine.abort(victim.id) is not None:
                outcome.aborted += 1
    outcome.preempted = engine.stats().preemptions
    return outcome


def check(model: str, first: int, count: int, alone: int, guesses: bool, formats: Mapping[str, str]) -> int:
    config: dict[str, object] = {"model": model, "device": "cuda", "depth": 2, "max_model_len": 256}
    config |= {"max_waiting": 1024, **formats}
    loaded = load(EngineConfig.of(**config))
    faults = 0
    results: list[Outcome] = []
    orders: Sequence[tuple[int, int, int]] = ((0, 512, 2400), (1, 300, 1200))  # seed, slots, blocks
    for seed, slots, blocks in orders:
        more = {"max_num_seqs": slots, "num_blocks": blocks, "swap_space_gb": 1.0}
        masking: list[Masking] = []

        def around(executor: Executor, made: list[Masking] = masking) -> Executor:
            made.append(Masking(executor, loaded.spec.vocab_size))
            return made[0]

        engine = build_engine(EngineConfig.of(**config, **more), loaded, keeps_tokens=True, around=around)
        if guesses:
            engine._speculation = Speculation(
                engine.scheduler, most=5, depth=2, takes_penalties=False, times=FreeTokens()
            )
        ids = list(range(first, first + count))
        if seed:
            random.Random(seed).shuffle(ids)
        run(engine, range(first + count, first + count + 300), seed, has_trouble=False)  # records most steps
        torch.cuda.synchronize()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        results.append(run(engine, ids, seed, has_trouble=True))
        torch.cuda.synchronize()
        stats, grown = engine.stats(), torch.cuda.memory_allocated() - before
        faults += stats.blocks_free != blocks or not 0 < stats.swaps < stats.preemptions
        print(
            f"{count} requests in {time.perf_counter() - began:.1f} s: {results[-1].aborted} aborted, "
            f"{stats.preemptions} preemptions, {stats.swaps} swaps, {masking[0].num_masks} masks, "
            f"blocks free {stats.blocks_free} of {blocks}, "
            f"device memory grew by {grown} bytes; {stats.tokens_accepted} of {stats.tokens_drafted} drafts right",
            flush=True,
        )
        if seed:
            engine._speculation = None
            solo = random.Random(5).sample(sorted(results[0].answers), alone)
            found = {id: run(engine, [id], 0, has_trouble=False).answers[id] for id in solo}
        engine.close()
        masking.clear()
        del engine
        gc.collect()
    full = {id: answer for id, answer in results[0].answers.items() if id in results[1].answers}
    differ = [id for id, answer in full.items() if answer != results[1].answers[id]]
    differ_alone = [id for id, answer in found.items() if answer != results[0].answers[id]]
    print(f"{len(full)} answers in both runs, {len(differ)} differ {differ[:5]}; "
          f"{len(found)} alone, {len(differ_alone)} differ {differ_alone[:5]}")  # fmt: skip
    return int(bool(faults or differ or differ_alone))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--first", type=int, default=1, help="number of the first request, one that is no tenth")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--alone", type=int, default=500)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--guesses", action="store_true", help="draft tokens by suffix, whatever they cost")
    args = parser.parse_args()
    formats = {"dtype": args.dtype, "kv_dtype": args.kv_dtype}
    sys.exit(check(args.model, args.first, args.count, args.alone, args.guesses, formats))
