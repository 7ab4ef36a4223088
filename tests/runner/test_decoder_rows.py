"""The real decoder under the real scheduler: a request's tokens and log probabilities do not depend, to the last
bit, on other rows, chunking, cache hits, preemption or depth."""

from collections.abc import Iterator
from itertools import product
from random import Random

import numpy as np
import pytest
import torch

from headway.core.ledger import KVLedger
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.kernels import ref
from headway.kv.prefix import chain_keys, chain_seed
from headway.models.decoder import Decoder
from headway.models.params import ModelWeights
from headway.models.registry import parameters
from headway.models.spec import ModelSpec
from headway.policies.fcfs import FirstComeFirstServed
from headway.runner.executor import CpuExecutor
from headway.runner.kvstore import KVStore
from headway.runner.slots import Slots
from headway.runner.weights import pack_weights
from headway.values.limits import Limits
from headway.values.params import SamplingParams
from headway.values.plan import TokenLogprob

BLOCK = 8
NUM = 9  # requests
LARGE, SMALL = 100, 16  # blocks: for all at once, and not
SPEC = ModelSpec(
    family="llama",
    vocab_size=97,
    hidden=48,
    intermediate=80,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_len=96,
    tie_embeddings=True,
)
Answer = list[tuple[int, TokenLogprob]]


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing from more
    rng = np.random.default_rng(3)
    shapes = {part.source: param.part_shape(part) for param in parameters(SPEC) for part in param.parts}
    tensors = ((name, rng.normal(0, 0.3, shape).astype(np.float32)) for name, shape in shapes.items())
    kernels = ref.load()
    yield Decoder(SPEC, ModelWeights(dict(pack_weights(tensors, SPEC, kernels)), kernels.layout), kernels)
    torch.set_num_threads(threads)


def _requests() -> Iterator[tuple[tuple[int, ...], SamplingParams, int]]:
    rng = Random(5)
    shared = tuple(rng.randrange(97) for _ in range(20))
    for i in range(NUM + 4):
        own = tuple(rng.randrange(97) for _ in range(rng.randint(1, 25)))
        params = SamplingParams(
            max_tokens=24,
            temperature=(0.0, 0.8, 1.3)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            repetition_penalty=(1.0, 1.0, 1.0, 1.2)[i % 4],
            logprobs=2,
        )
        yield (shared if i >= NUM else shared + own if i % 2 else own), params, 1000 + i


def _run(
    decoder: Decoder, picked: list[int], *, chunk: int | None, num_blocks: int, depth: int, parent: int | None = None
) -> dict[int, Answer]:
    """Every picked request to its end, with log probabilities."""
    kv = KVStore(
        layers=SPEC.layers, num_blocks=num_blocks, block_size=BLOCK, kv_heads=SPEC.kv_heads, head_dim=SPEC.head_dim
    )
    slots = Slots(num_rows=NUM, num_blocks=num_blocks, block_size=BLOCK, max_len=SPEC.max_len, vocab_size=97)
    executor = CpuExecutor(decoder, kv, slots)
    scheduler = Scheduler(KVLedger(num_blocks, BLOCK), Limits(NUM, 64, chunk), FirstComeFirstServed())
    chain = chain_seed("test")
    requests = [*_requests()]
    for id in picked:
        prompt, params, seed = requests[id]
        keys = chain_keys(prompt, BLOCK, chain)
        leader = None if id == parent else parent
        scheduler.add(Request(id, list(prompt), params, seed=seed, keys=keys, chain=chain, parent=leader))
    answers: dict[int, Answer] = {id: [] for id in picked}
    pending, preempted = [], 0
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        if plan is not None:
            executor.submit(plan)
            pending.append(plan)
        if pending and (plan is None or len(pending) >= depth):
            told = scheduler.commit(pending.pop(0), executor.collect())
            for id, token in zip(told.ids, told.tokens, strict=True):
                answers[id].append((token, told.logprobs[id][0]))
            assert not any(req.error for req in told.finished)
            preempted += sum(req.num_preempted for req in told.finished)
    executor.close()
    assert (preempted > 0) == (num_blocks == SMALL)
    return answers


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> dict[int, Answer]:
    answers: dict[int, Answer] = {}
    for id in range(NUM):
        answers |= _run(decoder, [id], chunk=None, num_blocks=LARGE, depth=1)
    assert all(len(answer) == 24 for answer in answers.values())
    return answers


@pytest.mark.parametrize(("chunk", "num_blocks", "depth"), [*product((5, None), (LARGE, SMALL), (1, 2))])
def test_other_requests_change_no_bit(
    decoder: Decoder, alone: dict[int, Answer], chunk: int | None, num_blocks: int, depth: int
) -> None:
    assert _run(decoder, [*range(NUM)], chunk=chunk, num_blocks=num_blocks, depth=depth) == alone


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_that_share_a_prompt_are_those_of_requests_alone(decoder: Decoder, depth: int) -> None:
    picked = [*range(NUM, NUM + 4)]
    alone: dict[int, Answer] = {}
    for id in picked:
        alone |= _run(decoder, [id], chunk=None, num_blocks=LARGE, depth=1)
    assert _run(decoder, picked, chunk=16, num_blocks=LARGE, depth=depth, parent=NUM) == alone
    assert len({tuple(token for token, _ in answer) for answer in alone.values()}) > 1
