"""The CUDA executor over a real tiny model: logits as the reference decoder has them, plans kept, bad rows set aside.

On a machine without a device Triton interprets the kernels, so every test is one short story.
"""

from __future__ import annotations

import pytest
import torch

from cuda_kit import CudaDesk, plain_weights, small_spec
from headway.engine.executor import Late
from headway.errors import EngineError
from headway.runner.cuda.step import Bucket
from headway.values.params import SamplingParams
from headway.values.plan import BlockCopy, BlockRef, Chunk, Grow, Samples, Tier
from runner_kit import GREEDY
from tiny_models import logits_alone, tiny_decoder

# Triton's interpreter divides by zero under masks and converts arrays the old way.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

PROMPT = [7, 90, 3, 55, 21, 8, 101, 64, 2, 33, 17, 120, 9, 44, 71, 5, 66, 12, 99, 31, 28]


def reference(desk: CudaDesk, tokens: list[int]) -> torch.Tensor:
    """Logits behind the last token."""
    return logits_alone(tiny_decoder(desk.spec), tokens)[-1]


def close(desk: CudaDesk, line: int, tokens: list[int]) -> bool:
    return torch.allclose(desk.logits()[line], reference(desk, tokens), atol=2e-4, rtol=0)


def test_chunks_and_decode_have_the_reference_decoders_logits() -> None:
    desk = CudaDesk()
    join = desk.join(2, PROMPT)
    assert desk.step(chunks=[Chunk(2, 0, 13, Samples.NONE)], joins=[join]).tokens == []
    first = desk.step(chunks=[Chunk(2, 13, 8, Samples.TOKEN)])
    assert close(desk, 0, PROMPT)
    tokens = [*PROMPT, first.tokens[0]]
    for _ in range(2):
        result = desk.step([2])
        assert close(desk, 0, tokens)
        tokens.append(result.tokens[0])
        assert tokens[-1] == int(desk.logits()[0].argmax())
        assert not result.failed


def test_float16_is_near_the_reference_and_the_same_in_company() -> None:
    spec = small_spec(layers=1)
    weights = plain_weights(spec, dtype=torch.float16)
    desk = CudaDesk(spec, weights=weights)
    first = desk.prefill(desk.join(0, PROMPT))
    found = [desk.logits()[0].clone()]
    desk.step([0])
    found.append(desk.logits()[0].clone())
    wanted = logits_alone(tiny_decoder(spec), [*PROMPT, *first.tokens])[-2:]
    for got, line in zip(found, wanted, strict=True):
        assert 0 < float((got - line).norm() / line.norm()) < 5e-3
    desk = CudaDesk(spec, weights=weights)
    other = PROMPT[4:12]
    joins = [desk.join(3, other), desk.join(0, PROMPT)]
    desk.step(chunks=[Chunk(3, 0, 8, Samples.TOKEN), Chunk(0, 0, 13, Samples.NONE)], joins=joins)
    desk.step([3], [Chunk(0, 13, 8, Samples.TOKEN)])
    assert torch.allclose(desk.logits()[1], found[0], atol=1e-3, rtol=0)


def test_rows_of_a_mixed_step_keep_to_themselves() -> None:
    desk = CudaDesk()
    one, two = PROMPT[:9], PROMPT[5:17]
    first = desk.prefill(desk.join(1, one))
    desk.submit([1], [Chunk(3, 0, len(two), Samples.TOKEN)], joins=[desk.join(3, two)])
    result = desk.executor.collect()
    assert close(desk, 0, [*one, first.tokens[0]])
    assert close(desk, 1, two)
    assert len(result.tokens) == 2


def test_a_fork_samples_from_its_sources_last_position() -> None:
    desk = CudaDesk()
    leader = desk.join(0, PROMPT)
    blocks = desk.blocks(40)
    fork = desk.join(1, PROMPT, table=blocks, start=len(PROMPT))
    chunks = [Chunk(0, 0, len(PROMPT), Samples.TOKEN), Chunk(1, len(PROMPT), 0, Samples.TOKEN, source=0)]
    result = desk.step(chunks=chunks, joins=[leader, fork])
    first = result.tokens[0]
    assert result.tokens[1] == first
    copies = [
        BlockCopy(BlockRef(Tier.DEVICE, a), BlockRef(Tier.DEVICE, b)) for a, b in zip(leader.table, blocks, strict=True)
    ]
    result = desk.step([0, 1], copies=copies)
    assert result.tokens[0] == result.tokens[1]
    assert torch.equal(desk.logits()[0], desk.logits()[1])
    assert close(desk, 1, [*PROMPT, first])


def test_two_plans_may_be_under_way() -> None:
    desk = CudaDesk()
    first = desk.prefill(desk.join(0, PROMPT))
    alone = [*first.tokens, *desk.decode(0, 3)]
    again = CudaDesk()
    again.submit(chunks=[Chunk(0, 0, len(PROMPT), Samples.TOKEN)], joins=[again.join(0, PROMPT)])
    tokens = []
    for _ in range(3):
        again.submit([0])
        tokens += again.executor.collect().tokens
    tokens += again.executor.collect().tokens
    assert tokens == alone


def test_a_rehearsal_between_steps_leaves_nothing_behind() -> None:
    desk = CudaDesk()
    first = desk.prefill(desk.join(0, PROMPT))
    desk.executor.graphs.rehearse(Bucket(2, 2, is_mixed=False))  # type: ignore[attr-defined]
    second = desk.step([0])
    assert close(desk, 0, [*PROMPT, *first.tokens])
    desk.executor.graphs.rehearse(Bucket(64, 4, is_mixed=True))  # type: ignore[attr-defined]
    desk.step([0])
    assert close(desk, 0, [*PROMPT, *first.tokens, *second.tokens])


def test_a_grown_table_is_used() -> None:
    desk = CudaDesk()
    prompt = PROMPT[:15]
    first = desk.prefill(desk.join(0, prompt, room=16))
    second = desk.step([0])
    assert not second.failed
    assert "cannot decode" in desk.step([0]).failed[0]
    desk = CudaDesk()
    desk.prefill(desk.join(0, prompt, room=16))
    desk.step([0])
    third = desk.step([0], grows=[Grow(0, 1, desk.blocks(16))])
    assert not third.failed
    assert close(desk, 0, [*prompt, *first.tokens, *second.tokens])


def test_a_row_that_cannot_run_leaves_its_neighbours_alone() -> None:
    desk = CudaDesk()
    desk.prefill(desk.join(0, PROMPT))
    result = desk.step([0, 3, 77])
    assert set(result.failed) == {3, 77}
    assert len(result.tokens) == 3
    assert desk.step([0]).failed == {}
    broken = desk.join(1, [5, 9999])
    assert "token ids" in desk.step([0], joins=[broken]).failed[1]


def test_logits_that_are_not_finite_fail_their_row_alone() -> None:
    desk = CudaDesk()
    desk.weights["embed"][13] = float("nan")
    sick, sound = PROMPT[:4], PROMPT[:6]
    joins = [desk.join(0, [*sick, 13]), desk.join(1, sound)]
    chunks = [Chunk(0, 0, 5, Samples.TOKEN), Chunk(1, 0, 6, Samples.TOKEN)]
    # The head is tied to the embedding, so token 13's own logit is not finite anywhere: look at the hidden state only.
    result = desk.step(chunks=chunks, joins=joins)
    assert "not finite" in result.failed[0]
    assert result.tokens[0] == 0


@pytest.mark.parametrize("heads", [6, 8, 40])  # 3, 4 and 20 to a key head
def test_a_token_that_is_not_finite_leaves_earlier_blocks_sound(heads: int) -> None:
    """A block that was filled before it may be shared by others, so what they compute over it must have its bits."""
    spec = small_spec(heads=heads, kv_heads=2, tie_embeddings=False)
    tokens = [(11 * i) % 60 + 20 for i in range(30)]
    shared = [*tokens[:16], *range(1, 7)]
    found = []
    for odd in (13, 14):
        desk = CudaDesk(spec)
        desk.weights["embed"][13] = float("nan")
        first = desk.join(0, [*tokens[:20], odd, *tokens[21:]], room=32)
        desk.step(chunks=[Chunk(0, 0, 5, Samples.NONE)], joins=[first])
        desk.step(chunks=[Chunk(0, 5, 25, Samples.TOKEN)])
        table = [first.table[0], *desk.blocks(16)]
        other = desk.join(1, shared, table=table, start=16)
        assert not desk.step(chunks=[Chunk(1, 16, 6, Samples.TOKEN)], joins=[other]).failed
        found.append(desk.logits()[0].clone())
    assert torch.equal(*found)


def test_stop_tokens_and_log_probabilities_come_with_the_result() -> None:
    desk = CudaDesk()
    plain = desk.prefill(desk.join(0, PROMPT))
    asked = SamplingParams(temperature=0.0, logprobs=3)
    result = desk.prefill(desk.join(1, PROMPT, asked, stop_ids=frozenset(plain.tokens)))
    assert result.tokens == plain.tokens
    assert result.stopped == [1]
    (entry,) = result.logprobs[1]
    expected = torch.log_softmax(reference(desk, PROMPT).double(), -1)
    top = expected.topk(3)
    assert [token for token, _ in entry.top] == top.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-3)
    assert entry.logprob == pytest.approx(float(top.values[0]), abs=1e-3)


def test_there_are_no_more_alternatives_than_tokens() -> None:
    desk = CudaDesk(small_spec(layers=1, vocab_size=7))
    result = desk.prefill(desk.join(0, [3, 5], SamplingParams(temperature=0.0, logprobs=20)))
    assert sorted(token for token, _ in result.logprobs[0][0].top) == list(range(7))


def mask(desk: CudaDesk, *allowed: int) -> bytes:
    bits = sum(1 << token for token in allowed)
    return bits.to_bytes(-(-desk.spec.vocab_size // 8), "little")


def test_a_masked_row_chooses_among_the_allowed_and_other_rows_are_unaffected() -> None:
    desk = CudaDesk()
    joins = [desk.join(row, PROMPT) for row in (0, 1)]
    chunks = [Chunk(row, 0, len(PROMPT), Samples.TOKEN) for row in (0, 1)]
    line = reference(desk, PROMPT)
    allowed = line.argsort()[:9].tolist()  # the least likely
    desk.executor.supply(desk.next_plan, Late(masks=((1, mask(desk, *allowed)),)))
    first = desk.step(chunks=chunks, joins=joins)
    assert first.tokens == [int(line.argmax()), allowed[-1]]
    desk.executor.supply(desk.next_plan, Late(masks=((0, mask(desk, 5)),)))
    second = desk.step([1, 0])
    assert close(desk, 0, [*PROMPT, allowed[-1]])
    assert second.tokens == [int(desk.logits()[0].argmax()), 5]
    third = desk.step([0])
    assert close(desk, 0, [*PROMPT, first.tokens[0], 5])
    assert third.tokens == [int(desk.logits()[0].argmax())], "a mask counts for its plan alone"


def test_masks_of_other_rows_in_turn_leave_nothing_behind_in_a_packet() -> None:
    desk = CudaDesk(small_spec(layers=1))
    chunks = [Chunk(row, 0, 5, Samples.TOKEN) for row in (0, 1)]
    desk.step(chunks=chunks, joins=[desk.join(row, PROMPT[:5]) for row in (0, 1)])
    for masked in (0, 1, 1, 0, 1, 0, 0, 1):  # four packets take turns
        desk.executor.supply(desk.next_plan, Late(masks=((masked, mask(desk, 3)),)))
        tokens = desk.step([0, 1]).tokens
        assert tokens[masked] == 3
        assert tokens[1 - masked] == int(desk.logits()[1 - masked].argmax())


def test_a_row_that_waits_for_feedback_goes_on_from_its_own_tokens() -> None:
    desk, alone = CudaDesk(), CudaDesk()
    fed, num = alone.prefill(alone.join(0, PROMPT)).tokens, len(PROMPT)
    fed += alone.decode(0, 3)
    joins = [desk.join(0, PROMPT), desk.join(1, PROMPT[:5])]
    chunks = [Chunk(0, 0, num, Samples.TOKEN), Chunk(1, 0, 5, Samples.TOKEN)]
    tokens = desk.step(chunks=chunks, joins=joins).tokens[:1]
    for i in range(3):  # a chunk of its newest token, as a row has whose mask depends on that token
        tokens.append(desk.step([1], chunks=[Chunk(0, num + i, 1, Samples.TOKEN)]).tokens[1])
    assert tokens == fed


def test_a_result_leaves_the_tokens_of_the_rows_next_request_alone() -> None:
    desk, alone = CudaDesk(), CudaDesk()
    wanted = alone.prefill(alone.join(0, PROMPT[::-1])).tokens
    desk.submit(chunks=[Chunk(0, 0, 3, Samples.TOKEN)], joins=[desk.join(0, PROMPT[:3])])
    late = desk.join(0, PROMPT[::-1])
    desk.submit(chunks=[Chunk(0, 0, 2, Samples.NONE)], joins=[late], leaves=[0])
    for _ in range(2):  # the token of the first request would be number 3 of the row
        desk.executor.collect()
    assert desk.step(chunks=[Chunk(0, 2, len(PROMPT) - 2, Samples.TOKEN)]).tokens == wanted


def test_a_mask_that_allows_nothing_fails_its_row_alone() -> None:
    desk = CudaDesk()
    joins = [desk.join(row, PROMPT[:5]) for row in (0, 1)]
    desk.executor.supply(desk.next_plan, Late(masks=((0, mask(desk)), (3, mask(desk)))))
    result = desk.step(chunks=[Chunk(row, 0, 5, Samples.TOKEN) for row in (0, 1)], joins=joins)
    assert list(result.failed) == [0]
    assert "every one is masked" in result.failed[0]
    assert result.tokens[1] == int(reference(desk, PROMPT[:5]).argmax())


def test_masks_come_before_their_plan_and_have_a_bit_for_every_token() -> None:
    desk = CudaDesk()
    with pytest.raises(EngineError, match=f"a mask has 1 bytes; {desk.spec.vocab_size} tokens take"):
        desk.executor.supply(0, Late(masks=((0, b"\x01"),)))
    desk.prefill(desk.join(0, PROMPT[:3]))
    with pytest.raises(EngineError, match="came after its submission"):
        desk.executor.supply(desk.next_plan - 1, Late(masks=((0, mask(desk, 1)),)))


def test_swapped_blocks_come_back_unchanged() -> None:
    desk = CudaDesk(host_blocks=4)
    first = desk.prefill(desk.join(0, PROMPT, room=32))
    expected = desk.decode(0, 2)
    desk = CudaDesk(host_blocks=4)
    join = desk.join(0, PROMPT, room=32)
    desk.prefill(join)
    hosts = [BlockRef(Tier.HOST, i) for i in (3, 1)]
    olds = [BlockRef(Tier.DEVICE, block) for block in join.table]
    news = [BlockRef(Tier.DEVICE, block) for block in desk.blocks(32)]
    desk.step(leaves=[0], copies=[BlockCopy(a, b) for a, b in zip(olds, hosts, strict=True)])
    back = [BlockCopy(a, b) for a, b in zip(hosts, news, strict=True)]
    wiped = [BlockCopy(BlockRef(Tier.DEVICE, desk.free[0]), old) for old in olds]
    again = desk.join(2, [*PROMPT, *first.tokens], GREEDY, num_prompt=len(PROMPT), table=[n.id for n in news], start=21)
    tokens = desk.step([2], joins=[again], copies=[*back, *wiped]).tokens
    tokens = [*tokens, *desk.decode(2, 1)]
    assert tokens == expected


def test_qwen_like_models_have_the_reference_decoders_logits() -> None:
    for changes in ({"qkv_bias": True}, {"qk_norm": True}, {"kv_heads": 6}, {"head_dim": 24, "tie_embeddings": False}):
        desk = CudaDesk(small_spec(layers=1, **changes))
        first = desk.prefill(desk.join(0, PROMPT))
        assert close(desk, 0, PROMPT), changes
        desk.step([0])
        assert close(desk, 0, [*PROMPT, *first.tokens]), changes
