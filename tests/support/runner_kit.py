"""What the runner's tests share: a model whose KV cells hash the whole prefix, naive references, a plan desk.

A cell of the hashing model depends on every cell before it, read through the block table: one wrong table entry,
slot, position or token anywhere changes all logits that follow.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from headway.models.batch import ForwardBatch
from headway.models.pick import Allowed, best_tokens
from headway.runner.executor import CpuExecutor
from headway.runner.kvstore import KVStore
from headway.runner.rng import uniform
from headway.runner.slots import Slots
from headway.runner.step_model import StepModel
from headway.values.params import SamplingParams
from headway.values.plan import BlockCopy, Chunk, Grow, Join, Samples, StepPlan, StepResult

VOCAB = 61
BLOCK = 4
GREEDY = SamplingParams(temperature=0.0)
_PRIME = 8388593  # below 2**24: exact in float32


def _cell(before: Sequence[int], token: int) -> int:
    mixed = sum(value * (2 * j + 3) for j, value in enumerate(before))
    return (mixed + token * 7919 + len(before) * 104729 + 1) % _PRIME


def _logits(cell: int) -> np.ndarray:
    ids = np.arange(VOCAB, dtype=np.uint64)
    mixed = (np.uint64(cell) * (2 * ids + 1) * np.uint64(2654435761) + ids * np.uint64(40503)) >> np.uint64(7)
    return ((mixed % np.uint64(4096)).astype(np.float32) / 512 - 4).astype(np.float32)


class PrefixHashModel:
    """`sick` gives NaN logits right behind that token, `poison` makes the whole forward raise."""

    def __init__(self, sick: int = -1, poison: int = -1, fatal: int = -1) -> None:
        self.sick, self.poison, self.fatal = sick, poison, fatal
        self.num_tokens = self.num_picks = 0
        self.threads: list[int] = []

    def forward(self, batch: ForwardBatch, kv: np.ndarray) -> np.ndarray:
        assert batch.tables.flags.c_contiguous
        tokens, rows = batch.tokens.tolist(), batch.row_of.tolist()
        if self.fatal in tokens:
            raise SystemExit("the machine is on fire")
        if self.poison in tokens:
            raise RuntimeError("poisoned batch")
        cells = kv[0, 0, :, :, 0, 0]
        hidden = []
        for token, row, position, slot in zip(
            tokens, rows, batch.positions.tolist(), batch.slot_map.tolist(), strict=True
        ):
            places = [divmod(j, batch.block_size) for j in range(position)]
            before = [int(cells[batch.tables[row, block], offset]) for block, offset in places]
            hidden.append(_cell(before, token))
            cells[divmod(slot, batch.block_size)] = hidden[-1]
            assert position < batch.context[row]
        self.num_tokens += len(tokens)
        lines = [np.full(VOCAB, np.nan) if tokens[i] == self.sick else _logits(hidden[i]) for i in batch.sample_index]
        return np.array(lines, np.float32).reshape(-1, VOCAB)

    def pick(self, batch: ForwardBatch, kv: np.ndarray, allowed: Allowed | None = None) -> np.ndarray:
        self.num_picks += 1
        return best_tokens(self.forward(batch, kv), allowed)


def oracle(prompt: Sequence[int], params: SamplingParams, seed: int, stop_ids: frozenset[int], num: int) -> list[int]:
    """The answer by a model and a sampler without batches, blocks, chunks or vectors."""
    tokens, cells = list(prompt), []
    while len(tokens) < len(prompt) + num:
        while len(cells) < len(tokens):
            cells.append(_cell(cells, tokens[len(cells)]))
        output = tokens[len(prompt) :]
        tokens.append(naive_choose(_logits(cells[-1]), params, seed, prompt, output, stop_ids))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def naive_scores(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: frozenset[int]
) -> list[float]:
    scores = [float(value) for value in logits]
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *output}:
        value = scores[token]
        scores[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    for token, length in naive_repeats([*prompt, *output], params).items():
        scores[token] -= params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    if len(output) < params.min_tokens:
        for token in stop_ids:
            scores[token] = -np.inf
    return scores


def naive_repeats(tokens: Sequence[int], params: SamplingParams) -> dict[int, int]:
    """Token -> how many of the last tokens stood right before it earlier on, where DRY counts them."""
    if not params.dry_multiplier:
        return {}
    seen, found = list(tokens[-params.dry_range :] if params.dry_range else tokens), dict[int, int]()
    for after in range(1, len(seen)):
        length = 0
        while length < min(after, 50) and seen[after - 1 - length] == seen[len(seen) - 1 - length]:
            if seen[after - 1 - length] in params.dry_breakers:
                break
            length += 1
        if length >= params.dry_allowed_length:
            found[seen[after]] = max(length, found.get(seen[after], 0))
    return found


def naive_probs(scores: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Token -> probability after temperature, top-k, top-p and min-p, in double precision by full sorts."""
    peak = max(scores)
    weights = {token: np.exp((score - peak) / params.temperature) for token, score in enumerate(scores)}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, mass, kept = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if params.top_p < 1.0 and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[kept[0]]]
    mass = sum(weights[token] for token in kept)
    return {token: weights[token] / mass for token in sorted(kept)}


def naive_choose(
    logits: np.ndarray,
    params: SamplingParams,
    seed: int,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: frozenset[int],
) -> int:
    scores = naive_scores(logits, params, prompt, output, stop_ids)
    if params.is_greedy:
        return max(range(len(scores)), key=lambda token: (np.float32(scores[token]), -token))
    at, mass = uniform(seed, len(prompt) + len(output)), 0.0
    probs = naive_probs(scores, params)
    if params.xtc_probability and uniform(~seed, len(prompt) + len(output)) < params.xtc_probability:
        top = [token for token, prob in probs.items() if prob >= params.xtc_threshold]
        stays = min(top, key=lambda token: (probs[token], -token), default=-1)
        probs = {token: 0.0 if token in top and token != stays else prob for token, prob in probs.items()}
        probs = {token: prob / sum(probs.values()) for token, prob in probs.items()}
    for token, prob in probs.items():
        mass += prob
        if at < mass:
            return token
    return max(probs)


class Desk:
    """Writes plans by hand: submits them in order to one executor and hands out blocks, the highest first."""

    def __init__(
        self,
        *,
        model: StepModel | None = None,
        num_rows: int = 4,
        num_blocks: int = 64,
        block_size: int = BLOCK,
        has_thread: bool = True,
    ) -> None:
        self.kv = KVStore(layers=1, num_blocks=num_blocks, block_size=block_size, kv_heads=1, head_dim=1)
        self.slots = Slots(
            num_rows=num_rows, num_blocks=num_blocks, block_size=block_size, max_len=128, vocab_size=VOCAB
        )
        self.model = model or PrefixHashModel()
        self.executor = CpuExecutor(self.model, self.kv, self.slots, has_thread=has_thread)
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.next_plan = 0

    def blocks(self, num_cells: int) -> tuple[int, ...]:
        return tuple(self.free.pop() for _ in range(-(-num_cells // self.block_size)))

    def join(
        self,
        row: int,
        tokens: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        seed: int = 7,
        stop_ids: frozenset[int] = frozenset(),
        num_prompt: int | None = None,
        table: Sequence[int] | None = None,
        start: int = 0,
        room: int = 40,
    ) -> Join:
        """Row 0 is request 100, and so on; by default it gets blocks for `room` tokens."""
        table = self.blocks(room) if table is None else table
        prompt = len(tokens) if num_prompt is None else num_prompt
        return Join(row, 100 + row, 0, tuple(tokens), prompt, table, start, params, seed, stop_ids)

    def submit(
        self,
        decode: Sequence[int] = (),
        chunks: Sequence[Chunk] = (),
        joins: Sequence[Join] = (),
        leaves: Sequence[int] = (),
        grows: Sequence[Grow] = (),
        copies: Sequence[BlockCopy] = (),
        steps: int = 1,
    ) -> StepPlan:
        plan = StepPlan(self.next_plan, array("i", decode), chunks, joins, leaves, grows, copies, steps)
        self.next_plan += 1
        self.executor.submit(plan)
        return plan

    def step(self, *args: object, **kwargs: object) -> StepResult:
        plan = self.submit(*args, **kwargs)  # type: ignore[arg-type]
        result = self.executor.collect()
        assert result.plan_id == plan.id
        return result

    def prefill(self, join: Join) -> StepResult:
        """Join and compute the whole prompt in one step."""
        whole = Chunk(join.row, join.start, len(join.tokens) - join.start, Samples.TOKEN)
        return self.step(chunks=[whole], joins=[join])

    def decode(self, row: int, num: int) -> list[int]:
        return [self.step([row]).tokens[0] for _ in range(num)]
