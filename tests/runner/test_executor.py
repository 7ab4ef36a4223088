"""Plans through the executor, against an oracle without batches, blocks or chunks."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from headway.engine.executor import Capacity, Late
from headway.errors import EngineDead, EngineError
from headway.models.batch import ForwardBatch
from headway.values.params import SamplingParams
from headway.values.plan import BlockCopy, BlockRef, Chunk, Grow, Samples, Tier
from runner_kit import BLOCK, GREEDY, VOCAB, Desk, PrefixHashModel, oracle

T, N, A = Samples.TOKEN, Samples.NONE, Samples.VERIFY
PROMPT = (3, 14, 15, 9, 26, 5, 35)
SEEDED = SamplingParams(temperature=1.2, top_k=30, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=2)


class GatedModel(PrefixHashModel):
    """Waits inside every forward until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_inside, self.may_go = threading.Event(), threading.Event()

    def forward(self, batch: ForwardBatch, kv: np.ndarray) -> np.ndarray:
        self.is_inside.set()
        self.may_go.wait(10)
        return super().forward(batch, kv)


class InterruptedModel(PrefixHashModel):
    """While `is_interrupted`, Ctrl-C comes right behind a forward."""

    is_interrupted = False

    def forward(self, batch: ForwardBatch, kv: np.ndarray) -> np.ndarray:
        logits = super().forward(batch, kv)
        if self.is_interrupted:
            raise KeyboardInterrupt
        return logits


def _expect(prompt: tuple[int, ...], num: int, params: SamplingParams = GREEDY, seed: int = 7) -> list[int]:
    return oracle(prompt, params, seed, frozenset(), num)


def _device(src: int, dst: int) -> BlockCopy:
    return BlockCopy(BlockRef(Tier.DEVICE, src), BlockRef(Tier.DEVICE, dst))


@pytest.fixture(params=[True, False], ids=["own thread", "caller's thread"])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    desk = Desk(has_thread=request.param)
    yield desk
    desk.executor.close()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("sizes", [(7,), (1,) * 7, (3, 4), (4, 3), (5, 1, 1)])
def test_any_chunking_of_the_prompt_gives_the_same_tokens(
    desk: Desk, params: SamplingParams, sizes: tuple[int, ...]
) -> None:
    joins, start = [desk.join(0, PROMPT, params)], 0
    for size in sizes:
        is_last = start + size == len(PROMPT)
        result = desk.step(chunks=[Chunk(0, start, size, T if is_last else N)], joins=joins)
        assert len(result.tokens) == is_last
        joins, start = [], start + size
    assert [*result.tokens, *desk.decode(0, 9)] == _expect(PROMPT, 10, params)


def test_decode_rows_and_chunks_share_a_step(desk: Desk) -> None:
    first = desk.prefill(desk.join(2, PROMPT)).tokens
    other = (8, 8, 1)
    mixed = desk.step([2], [Chunk(1, 0, 3, T)], [desk.join(1, other)])
    both = desk.step([2, 1])
    assert [*first, mixed.tokens[0], both.tokens[0]] == _expect(PROMPT, 3)
    assert [mixed.tokens[1], both.tokens[1]] == _expect(other, 2)
    assert both.elapsed > 0


def test_forks_sample_from_the_prompt_of_another_row_and_go_their_own_way(desk: Desk) -> None:
    leader = desk.join(0, PROMPT, SEEDED, seed=1)
    shared, tails = leader.table[:1], {1: desk.blocks(40), 2: desk.blocks(40)}
    forks = [
        desk.join(row, PROMPT, SEEDED, seed=row + 1, table=(*shared, leader.table[1]), start=len(PROMPT))
        for row in (1, 2)
    ]
    chunks = [Chunk(0, 0, 7, T), *(Chunk(row, 7, 0, T, source=0) for row in (1, 2))]
    answers = [[token] for token in desk.step(chunks=chunks, joins=[leader, *forks]).tokens]
    assert isinstance(desk.model, PrefixHashModel)
    assert desk.model.num_tokens == len(PROMPT)
    # The half-filled block is copied before the forks write to it; the leader keeps the original.
    grows = [Grow(row, 1, tails[row]) for row in (1, 2)]
    copies = [_device(leader.table[1], tails[row][0]) for row in (1, 2)]
    for step in range(6):
        result = desk.step([0, 1, 2], grows=grows if step == 0 else (), copies=copies if step == 0 else ())
        for answer, token in zip(answers, result.tokens, strict=True):
            answer.append(token)
    assert answers == [_expect(PROMPT, 7, SEEDED, seed) for seed in (1, 2, 3)]
    assert len({tuple(answer) for answer in answers}) == 3


def test_a_block_that_is_swapped_for_its_copy_leaves_the_original_alone(desk: Desk) -> None:
    first = desk.join(0, PROMPT)
    desk.prefill(first)
    before = desk.kv.data[:, :, first.table[1]].copy()
    mine = desk.blocks(BLOCK)[0]
    joined = desk.join(1, PROMPT, seed=9, table=first.table[:2], start=6)
    result = desk.step(
        chunks=[Chunk(1, 6, 1, T)],
        joins=[joined],
        grows=[Grow(1, 1, (mine,)), Grow(1, 2, desk.blocks(12))],
        copies=[_device(first.table[1], mine)],
    )
    assert [*result.tokens, *desk.decode(1, 5)] == _expect(PROMPT, 6)
    assert (desk.kv.data[:, :, first.table[1]] == before).all()


def test_growth_arrives_in_the_step_that_needs_it(desk: Desk) -> None:
    answer = [*desk.prefill(desk.join(0, PROMPT, room=8)).tokens]
    for position in range(7, 20):
        grows = [Grow(0, position // BLOCK, desk.blocks(BLOCK))] if position % BLOCK == 0 else []
        answer += desk.step([0], grows=grows).tokens
    assert answer == _expect(PROMPT, 14)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_preempted_request_resumes_with_the_same_tokens(desk: Desk, params: SamplingParams) -> None:
    first = desk.join(0, PROMPT, params)
    answer = [*desk.prefill(first).tokens, *desk.decode(0, 4)]
    thief = desk.join(3, (1, 2, 3), table=first.table)
    desk.step(chunks=[Chunk(3, 0, 3, T)], joins=[thief], leaves=[0])
    again = desk.join(2, (*PROMPT, *answer), params, num_prompt=len(PROMPT))
    desk.step(chunks=[Chunk(2, 0, 8, N)], joins=[again])
    answer += desk.step(chunks=[Chunk(2, 8, 4, T)]).tokens
    assert [*answer, *desk.decode(2, 4)] == _expect(PROMPT, 10, params)


def test_a_row_may_leave_and_be_joined_in_one_plan_while_its_last_plan_is_under_way(desk: Desk) -> None:
    first = desk.join(0, PROMPT)
    answer = [*desk.prefill(first).tokens]
    other = (40, 41)
    desk.submit([0])
    desk.submit(chunks=[Chunk(0, 0, 2, T)], joins=[desk.join(0, other, table=first.table)], leaves=[0])
    answer += desk.executor.collect().tokens
    assert answer == _expect(PROMPT, 2)
    assert [*desk.executor.collect().tokens, *desk.decode(0, 3)] == _expect(other, 4)


def test_plans_ahead_of_their_results_use_the_tokens_kept_here(desk: Desk) -> None:
    answer = [*desk.prefill(desk.join(0, PROMPT, SEEDED)).tokens]
    for _ in range(8):
        desk.submit([0])
    results = [desk.executor.collect() for _ in range(8)]
    assert [result.plan_id for result in results] == [*range(1, 9)]
    assert [*answer, *(result.tokens[0] for result in results)] == _expect(PROMPT, 9, SEEDED)


def test_a_cached_prefix_is_not_computed_again(desk: Desk) -> None:
    first = desk.join(0, PROMPT)
    desk.prefill(first)
    longer = (*PROMPT[:4], 50, 51)
    second = desk.join(1, longer, table=(first.table[0], *desk.blocks(20)), start=4)
    assert isinstance(desk.model, PrefixHashModel)
    before = desk.model.num_tokens
    assert [*desk.prefill(second).tokens, *desk.decode(1, 3)] == _expect(longer, 4)
    assert desk.model.num_tokens - before == 2 + 3


def test_rows_stop_at_their_own_stop_tokens_and_not_before_min_tokens(desk: Desk) -> None:
    answer = _expect(PROMPT, 3)
    stop = frozenset({answer[1]})
    patient = SamplingParams(temperature=0.0, min_tokens=20)
    result = desk.step(
        chunks=[Chunk(row, 0, 7, T) for row in range(3)],
        joins=[
            desk.join(0, PROMPT, stop_ids=stop),
            desk.join(1, PROMPT),
            desk.join(2, PROMPT, patient, stop_ids=stop),
        ],
    )
    assert not result.stopped
    result = desk.step([0, 1, 2])
    assert result.stopped == [0]
    assert result.tokens[:2] == [answer[1]] * 2
    assert result.tokens[2] == oracle(PROMPT, patient, 7, stop, 2)[1] != answer[1]


def test_a_step_of_plain_greedy_rows_picks_and_any_other_reads_logits(desk: Desk) -> None:
    model = desk.model
    assert isinstance(model, PrefixHashModel)
    desk.prefill(desk.join(0, PROMPT))
    assert desk.decode(0, 3) == _expect(PROMPT, 4)[1:]
    assert model.num_picks == 4
    seeded = desk.join(1, PROMPT, SEEDED)
    mixed = [desk.step([0], [Chunk(1, 0, len(PROMPT), T)], [seeded]).tokens, desk.step([0, 1]).tokens]
    assert [list(step) for step in zip(*mixed, strict=True)] == [_expect(PROMPT, 6)[4:], _expect(PROMPT, 2, SEEDED)]
    assert model.num_picks == 4
    assert desk.step([0], leaves=[1]).tokens == _expect(PROMPT, 7)[6:]
    assert model.num_picks == 5


def test_a_greedy_row_is_not_plain_before_its_min_tokens_are_out(desk: Desk) -> None:
    model = desk.model
    assert isinstance(model, PrefixHashModel)
    first = _expect(PROMPT, 1)[0]
    params = SamplingParams(temperature=0.0, min_tokens=2)
    tokens = desk.prefill(desk.join(0, PROMPT, params, stop_ids=frozenset({first}))).tokens
    assert tokens[0] != first
    desk.decode(0, 2)
    assert model.num_picks == 1


def test_logprobs_come_for_the_rows_that_asked(desk: Desk) -> None:
    asked = SamplingParams(temperature=0.0, logprobs=3)
    result = desk.step(
        chunks=[Chunk(0, 0, 7, T), Chunk(1, 0, 7, T)], joins=[desk.join(0, PROMPT), desk.join(1, PROMPT, asked)]
    )
    assert result.logprobs.keys() == {1}
    (entry,) = result.logprobs[1]
    assert entry.top[0] == (result.tokens[1], entry.logprob)
    assert len(entry.top) == 3
    assert not result.counts


# ---- drafts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_drafts_change_speed_and_nothing_else(desk: Desk, params: SamplingParams, num_right: int) -> None:
    answer = _expect(PROMPT, 12, params)
    company = desk.join(1, (8, 8, 1))
    desk.step(chunks=[Chunk(0, 0, 7, T), Chunk(1, 0, 3, T)], joins=[desk.join(0, PROMPT, params), company])
    drafts = [*answer[1:4]]
    if num_right < 3:
        drafts[num_right] = (drafts[num_right] + 1) % VOCAB
    result = desk.step([1], [Chunk(0, 7, 4, A, drafts=tuple(drafts))])
    assert result.counts == {0: num_right + 1}
    assert result.tokens[1:] == answer[1 : num_right + 2]
    assert result.tokens[0] == _expect((8, 8, 1), 2)[1]
    if params.logprobs is not None:
        assert len(result.logprobs[0]) == num_right + 1
    rest = answer[num_right + 2 :]
    assert desk.decode(0, len(rest)) == rest


def test_a_stop_token_ends_a_draft(desk: Desk) -> None:
    answer = _expect(PROMPT, 4)
    desk.prefill(desk.join(0, PROMPT, stop_ids=frozenset({answer[2]})))
    result = desk.step(chunks=[Chunk(0, 7, 4, A, drafts=tuple(answer[1:4]))])
    assert (result.tokens, result.counts, result.stopped) == (answer[1:3], {0: 2}, [0])


# ---- trouble ---------------------------------------------------------------------------------------------------


def test_a_row_without_finite_logits_fails_alone_and_stays_out_until_joined_anew() -> None:
    desk = Desk(model=PrefixHashModel(sick=60))
    chunks = [Chunk(0, 0, 7, T), Chunk(1, 0, 2, T), Chunk(2, 2, 0, T, source=1)]
    any_token = frozenset(range(VOCAB))  # whatever fills a failed row's place is no stop token
    joins = [desk.join(0, PROMPT), desk.join(1, (5, 60), stop_ids=any_token), desk.join(2, (5, 60), SEEDED, start=2)]
    result = desk.step(chunks=chunks, joins=joins)
    assert result.failed == {1: "logits are not finite", 2: "logits are not finite"}
    assert len(result.tokens) == 3
    assert not result.stopped
    later = desk.step([0, 1, 2])
    assert later.failed == result.failed
    assert [result.tokens[0], later.tokens[0]] == _expect(PROMPT, 2)
    assert desk.prefill(desk.join(1, PROMPT)).tokens == _expect(PROMPT, 1)
    desk.executor.close()


def test_rows_that_make_no_sense_fail_with_a_reason_and_their_neighbours_go_on(desk: Desk) -> None:
    answer = [*desk.prefill(desk.join(0, PROMPT)).tokens]
    result = desk.step(
        [0, 3],
        [Chunk(1, 0, 2, T), Chunk(2, 0, 2, Samples.VERIFY, num_drafts=1)],
        [desk.join(1, (VOCAB, 1)), desk.join(2, (1,))],
        grows=[Grow(3, 0, (1,))],
    )
    assert result.failed.keys() == {1, 2, 3}
    assert "allowed: 0 to 60" in result.failed[1]
    assert "draft tokens" in result.failed[2]
    assert "no request has joined" in result.failed[3]
    assert len(result.tokens) == 4
    answer += result.tokens[:1]
    assert [*answer, *desk.decode(0, 2)] == _expect(PROMPT, 4)
    again = desk.step(chunks=[Chunk(2, 0, 1, T)])
    assert again.failed == {2: result.failed[2]}


def test_a_row_without_a_block_for_its_next_token_fails_and_writes_nowhere(desk: Desk) -> None:
    desk.prefill(desk.join(0, PROMPT, room=8))
    desk.decode(0, 1)
    before = desk.kv.data.copy()
    result = desk.step([0])
    assert "its table covers 8" in result.failed[0]
    assert (desk.kv.data == before).all()


def test_an_error_in_a_step_fails_the_row_that_causes_it_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(model=PrefixHashModel(poison=13))
    answer = [*desk.prefill(desk.join(0, PROMPT)).tokens]
    desk.submit(chunks=[Chunk(1, 0, 2, N), Chunk(2, 0, 1, T)], joins=[desk.join(1, (13, 2)), desk.join(2, (4,))])
    desk.submit([0])
    bad, good = desk.executor.collect(), desk.executor.collect()
    assert bad.failed == {1: "the step failed: RuntimeError('poisoned batch')"}
    assert bad.tokens == _expect((4,), 1)
    assert [*answer, *good.tokens] == _expect(PROMPT, 2)
    assert "plan 1 failed" in caplog.text
    desk.executor.close()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"copies": [BlockCopy(BlockRef(Tier.HOST, 0), BlockRef(Tier.DEVICE, 1))]}, "tier HOST"),
        ({"steps": 4}, "4 repeats"),
    ],
)
def test_what_this_executor_does_not_offer_fails_the_plan(desk: Desk, wrong: dict[str, object], reason: str) -> None:
    desk.prefill(desk.join(0, PROMPT))
    result = desk.step([0], **wrong)
    assert reason in result.failed[0]
    assert len(result.tokens) == 1


def test_a_dead_worker_makes_collect_raise() -> None:
    desk = Desk(model=PrefixHashModel(fatal=13))
    desk.submit(chunks=[Chunk(0, 0, 1, T)], joins=[desk.join(0, (13,))])
    desk.submit([0])
    for _ in range(2):
        with pytest.raises(EngineDead, match="on fire"):
            desk.executor.collect()
    with pytest.raises(EngineDead):
        desk.submit([0])
    desk.executor.close()


def test_a_step_that_ends_its_thread_ends_the_executor_without_one_too() -> None:
    desk = Desk(model=PrefixHashModel(fatal=13), has_thread=False)
    desk.submit(chunks=[Chunk(0, 0, 1, T)], joins=[desk.join(0, (13,))])
    with pytest.raises(EngineDead, match="on fire"):
        desk.executor.collect()
    with pytest.raises(EngineDead, match="on fire"):
        desk.submit([0])
    desk.executor.close()


def test_an_interrupted_step_ends_its_rows_and_no_others() -> None:
    model = InterruptedModel()
    desk = Desk(model=model, has_thread=False)
    desk.prefill(desk.join(0, PROMPT))
    desk.prefill(desk.join(1, PROMPT))
    model.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        desk.submit([0])
    model.is_interrupted = False
    assert desk.executor.collect().failed == {0: "the step was interrupted"}
    both = desk.step([0, 1])
    assert both.failed == {0: "the step was interrupted"}
    assert both.tokens[1] == _expect(PROMPT, 2)[1]
    assert list(desk.prefill(desk.join(0, PROMPT)).tokens) == _expect(PROMPT, 1)
    desk.executor.close()


def test_without_a_thread_there_is_none() -> None:
    before = threading.active_count()
    desk = Desk(has_thread=False)
    desk.prefill(desk.join(0, PROMPT))
    assert threading.active_count() == before
    desk.executor.close()
    desk.executor.close()
    with pytest.raises(EngineDead, match="closed"):
        desk.submit([0])
    with pytest.raises(EngineDead, match="closed"):
        desk.executor.collect()


def test_close_drops_the_plans_that_wait() -> None:
    model = GatedModel()
    desk = Desk(model=model)
    desk.submit(chunks=[Chunk(0, 0, 7, T)], joins=[desk.join(0, PROMPT)])
    desk.submit([0])
    model.is_inside.wait(10)
    closer = threading.Thread(target=desk.executor.close)
    closer.start()
    desk.executor._closing.wait(10)
    model.may_go.set()
    closer.join(10)
    assert not closer.is_alive()
    assert model.num_tokens == len(PROMPT)


def test_close_ends_the_thread_once_and_for_all() -> None:
    before = threading.active_count()
    desk = Desk()
    desk.prefill(desk.join(0, PROMPT))
    desk.submit([0])
    assert threading.active_count() == before + 1
    desk.executor.close()
    desk.executor.close()
    assert threading.active_count() == before
    with pytest.raises(EngineDead, match="closed"):
        desk.submit([0])
    with pytest.raises(EngineDead, match="closed"):
        desk.executor.collect()


def test_capacity_and_supply(desk: Desk) -> None:
    assert desk.executor.capacity() == Capacity(
        num_blocks=64, block_size=BLOCK, num_rows=4, host_blocks=0, verifies=True, guesses=True
    )
    desk.executor.supply(0, Late())


def _mask(*allowed: int) -> bytes:
    bits = np.zeros(VOCAB, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_masked_row_chooses_among_the_allowed_and_other_rows_are_unaffected(
    desk: Desk, params: SamplingParams
) -> None:
    best, other = _expect(PROMPT, 1, params)[0], _expect((8, 9), 1)[0]
    allowed = [token for token in (5, 20, 41, 60) if token != best]
    chunks = [Chunk(0, 0, len(PROMPT), T), Chunk(1, 0, 2, T)]
    desk.executor.supply(desk.next_plan, Late(masks=((0, _mask(*allowed)),)))
    result = desk.step(chunks=chunks, joins=[desk.join(0, PROMPT, params), desk.join(1, (8, 9))])
    assert result.tokens[0] in allowed
    assert result.tokens[1] == other
    assert not result.failed
    if params is GREEDY:  # without a mask the row goes on as any row with that token
        assert desk.decode(0, 3) == _expect((*PROMPT, result.tokens[0]), 3)


def test_one_allowed_token_is_the_token(desk: Desk) -> None:
    desk.executor.supply(desk.next_plan, Late(masks=((0, _mask(33)),)))
    assert desk.prefill(desk.join(0, PROMPT)).tokens == [33]


@pytest.mark.parametrize("mask", [_mask(), b"\x01", b""], ids=["empty", "short", "none"])
def test_a_mask_that_allows_nothing_or_is_broken_fails_its_row_alone(desk: Desk, mask: bytes) -> None:
    chunks = [Chunk(0, 0, len(PROMPT), T), Chunk(1, 0, 2, T)]
    desk.executor.supply(desk.next_plan, Late(masks=((0, mask),)))
    result = desk.step(chunks=chunks, joins=[desk.join(0, PROMPT), desk.join(1, (8, 9))])
    assert list(result.failed) == [0]
    assert "no token is left" in result.failed[0]
    assert result.tokens[1] == _expect((8, 9), 1)[0]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_each_draft_token_is_verified_under_its_own_mask(desk: Desk, params: SamplingParams) -> None:
    """With drafts and with single steps: the same masks at the same places give the same tokens."""
    masks = [_mask(*range(at, VOCAB, 3)) for at in range(4)]
    alone = desk.join(0, PROMPT, params)
    desk.executor.supply(desk.next_plan, Late(masks=((0, masks[0]),)))
    answer = list(desk.step(chunks=[Chunk(0, 0, 7, T)], joins=[alone]).tokens)
    for at in range(1, 4):
        desk.executor.supply(desk.next_plan, Late(masks=((0, masks[at]),)))
        answer += desk.step([0]).tokens
    for num_right in range(3):
        drafts = answer[1:3]
        if num_right < 2:
            drafts[num_right] = (drafts[num_right] + 1) % VOCAB
        desk.executor.supply(desk.next_plan, Late(masks=((0, masks[0]),)))
        desk.step(leaves=[0], chunks=[Chunk(0, 0, 7, T)], joins=[alone])
        desk.executor.supply(desk.next_plan, Late(masks=((0, b"".join(masks[1:])),)))
        result = desk.step(chunks=[Chunk(0, 7, 3, A, drafts=tuple(drafts))])
        assert result.tokens == answer[1 : num_right + 2]


def test_a_draft_with_too_few_masks_fails_its_row_alone(desk: Desk) -> None:
    company = desk.join(1, (8, 8, 1))
    desk.step(chunks=[Chunk(0, 0, 7, T), Chunk(1, 0, 3, T)], joins=[desk.join(0, PROMPT), company])
    drafts = tuple(_expect(PROMPT, 3)[1:])
    desk.executor.supply(desk.next_plan, Late(masks=((0, _mask(*range(VOCAB))),)))
    result = desk.step([1], [Chunk(0, 7, 3, A, drafts=drafts)])
    assert list(result.failed) == [0]
    assert result.tokens[0] == _expect((8, 8, 1), 2)[1]


def test_a_row_with_a_grammar_and_no_mask_fails_rather_than_takes_any_token(desk: Desk) -> None:
    chunks = [Chunk(0, 0, len(PROMPT), T), Chunk(1, 0, 2, T)]
    free = SamplingParams(max_tokens=9, temperature=0.0, grammar="{}")
    result = desk.step(chunks=chunks, joins=[desk.join(0, PROMPT, free), desk.join(1, (8, 9))])
    assert "mask of a row with a grammar is missing" in result.failed[0]
    assert result.tokens[1] == _expect((8, 9), 1)[0]


def test_masks_come_before_their_plan(desk: Desk) -> None:
    desk.prefill(desk.join(0, PROMPT))
    with pytest.raises(EngineError, match="after its submission"):
        desk.executor.supply(desk.next_plan - 1, Late(masks=((0, _mask(1)),)))


def test_greedy_rows_never_need_logits_whatever_their_masks_and_drafts(desk: Desk) -> None:
    model = desk.model
    assert isinstance(model, PrefixHashModel)
    held = SamplingParams(max_tokens=9, temperature=0.0, grammar="{}")
    desk.executor.supply(desk.next_plan, Late(masks=((0, _mask(3, 5)),)))
    chunks = [Chunk(0, 0, len(PROMPT), T), Chunk(1, 0, 2, T)]
    first = desk.step(chunks=chunks, joins=[desk.join(0, PROMPT, held), desk.join(1, (8, 9))])
    drafts = tuple(_expect((8, 9), 3)[1:])
    desk.executor.supply(desk.next_plan, Late(masks=((0, _mask(20, 41)),)))
    second = desk.step(chunks=[Chunk(0, len(PROMPT), 1, T), Chunk(1, 2, 3, A, drafts=drafts)])
    assert model.num_picks == 2
    assert first.tokens[0] in (3, 5)
    assert second.tokens[0] in (20, 41)
    assert [first.tokens[1], *second.tokens[1:]] == _expect((8, 9), 4)
