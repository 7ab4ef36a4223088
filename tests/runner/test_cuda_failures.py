"""A device that can no longer be used ends its executor, and its process: no row is blamed, and answers go on."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cuda_kit
from cuda_kit import CudaDesk, small_spec
from headway.errors import EngineDead
from headway.runner.cuda.graphs import without_collections
from headway.runner.cuda.packet import Packed
from headway.runner.cuda.step import Bucket
from headway.values.params import SamplingParams
from headway.values.plan import BlockCopy, BlockRef, Chunk, Samples, Tier

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

PROMPT = [7, 90, 3, 55, 21]
CHILD = (str(Path(cuda_kit.__file__).with_name("cuda_child.py")),)


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def desk() -> CudaDesk:
    desk = CudaDesk(small_spec(layers=1), host_blocks=4)
    desk.prefill(desk.join(0, PROMPT))
    return desk


def test_a_step_that_raises_on_a_sound_device_fails_its_rows_alone(
    desk: CudaDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(desk.executor.graphs, "bucket", fail)  # type: ignore[attr-defined]
        assert "the step failed" in desk.step([0]).failed[0]
    assert not desk.prefill(desk.join(1, PROMPT)).failed


def test_a_row_given_to_another_request_meanwhile_does_not_fail_for_the_last_one() -> None:
    spec = small_spec(layers=1, tie_embeddings=False)
    weights = cuda_kit.plain_weights(spec)
    weights["embed"][13] = float("nan")
    desk = CudaDesk(spec, weights=weights)
    sick = desk.join(0, [5, 13])
    desk.submit(chunks=[Chunk(0, 0, 2, Samples.TOKEN)], joins=[sick])
    desk.submit(chunks=[Chunk(0, 0, 5, Samples.TOKEN)], joins=[desk.join(0, PROMPT)], leaves=[0])
    assert desk.executor.collect().failed == {0: "logits are not finite"}
    assert not desk.executor.collect().failed
    assert not desk.step([0]).failed, "the request before it failed"
    assert desk.prefill(sick).failed, "no other request has the row after this one"
    assert "not finite" in desk.step([0]).failed[0]


def test_a_step_that_raises_on_a_device_that_is_not_sound_is_the_end(
    desk: CudaDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk.executor.graphs, "replay", fail)  # type: ignore[attr-defined]
    monkeypatch.setattr(desk.executor, "_is_idle", fail)
    with pytest.raises(EngineDead, match=r"can no longer be used .*illegal memory access"):
        desk.submit([0])
    for call in (desk.executor.collect, desk.executor.prepare, lambda: desk.submit([0])):  # type: ignore[attr-defined]
        with pytest.raises(EngineDead, match="can no longer be used"):
            call()
    desk.executor.close()


def test_a_device_that_fails_while_a_result_is_awaited_is_the_end(
    desk: CudaDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk.executor.graphs, "replay", lambda bucket: None)  # type: ignore[attr-defined]
    desk.submit([0])
    with monkeypatch.context() as patch:
        patch.setattr(desk.executor, "_is_idle", fail)
        with pytest.raises(EngineDead, match="illegal memory access"):
            desk.executor.collect()
    desk.executor._dead = None  # type: ignore[attr-defined]
    with pytest.raises(EngineDead, match="idle and a queued step left no result"):
        desk.executor.collect()


@pytest.mark.parametrize("is_sound", [True, False])
def test_memory_that_kernels_of_a_failed_plan_read_is_kept_until_they_have_run(
    desk: CudaDesk, monkeypatch: pytest.MonkeyPatch, is_sound: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(desk.executor.graphs, "bucket", fail)  # type: ignore[attr-defined]
        penalized = desk.join(1, PROMPT, SamplingParams(repetition_penalty=1.2))
        desk.submit(chunks=[Chunk(1, 0, 5, Samples.TOKEN)], joins=[penalized])
    (tokens,) = map(weakref.ref, desk.executor._pending[0].held)  # type: ignore[attr-defined]  # counted by a kernel
    seen = []

    def query() -> bool:
        seen.append(tokens() is not None)
        if not is_sound:
            fail()
        return len(seen) > 2

    stream = SimpleNamespace(query=query)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        patch.setattr(desk.executor, "_is_cuda", True)
        if is_sound:
            assert "the step failed" in desk.executor.collect().failed[1]
        else:
            with pytest.raises(EngineDead, match="illegal memory access"):
                desk.executor.collect()
    assert seen == [True] * (3 if is_sound else 1)


@pytest.mark.parametrize("where", ["_run", "send"])
def test_a_plan_of_which_the_device_has_a_part_is_the_end(
    desk: CudaDesk, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Blocks that were to leave would be lost, and nothing would say so."""
    monkeypatch.setattr(desk.executor._kv, where, fail)  # type: ignore[attr-defined]
    with pytest.raises(EngineDead, match="illegal memory access"):
        desk.submit([0], copies=[BlockCopy(BlockRef(Tier.DEVICE, 0), BlockRef(Tier.HOST, 1))])


def test_copies_that_name_no_block_reach_no_device_and_fail_rows_alone(desk: CudaDesk) -> None:
    bad = BlockCopy(BlockRef(Tier.DEVICE, 0), BlockRef(Tier.HOST, 99))
    assert "the step failed" in desk.step([0], copies=[bad]).failed[0]
    assert not desk.prefill(desk.join(1, PROMPT)).failed


def test_every_bucket_is_recorded_ahead_once_and_none_that_a_step_has_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = CudaDesk(small_spec(layers=1), num_rows=40)
    made, recorded = desk.executor.graphs, []  # type: ignore[attr-defined]
    needed, broken = Bucket(8, 8, False), Bucket(4, 4, False)

    def record(bucket: Bucket) -> None:
        recorded.append(bucket)
        if bucket == broken:
            fail()

    monkeypatch.setattr(made, "_is_cuda", True)
    monkeypatch.setattr(made, "record", record)
    made._graphs[needed] = object()
    desk.executor._is_rehearsed = True  # type: ignore[attr-defined]  # what a device compiles besides is not counted
    num = 1
    while desk.executor.prepare():  # type: ignore[attr-defined]
        num += 1
    assert len(recorded) == num - 1 == len(set(recorded))
    assert set(recorded) == set(made.buckets()) - {needed}
    assert recorded[0] == Bucket(1, 1, False), "what a first request needs comes first"
    packets = [Packed(rows, 0, rows) for rows in range(41)]
    packets += [Packed(rows, num, 40) for rows in (0, 7, 39) for num in range(128 - rows)]  # many sample one position
    for packed in packets:
        for is_special in (False, True):
            found = made.bucket(packed, is_special=is_special)
            assert found in {*recorded, needed}
            assert found.tokens >= packed.num_decode + packed.num_tokens
            assert found.samples >= packed.num_samples


def test_nothing_is_collected_while_a_step_is_captured() -> None:
    gc.enable()
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(RuntimeError), without_collections():
        fail()
    assert gc.isenabled()


def test_no_step_has_448_rows_which_take_longer_than_480() -> None:
    desk = CudaDesk(small_spec(layers=1), num_rows=600, max_tokens=600)
    found = {bucket.tokens for bucket in desk.executor.graphs.buckets()}  # type: ignore[attr-defined]
    assert {416, 480, 512} <= found
    assert 448 not in found


def test_a_scheduler_is_told_what_steps_with_chunks_are_padded_to() -> None:
    desk = CudaDesk(small_spec(layers=1), num_rows=40)
    sizes, made = desk.executor.capacity().step_sizes, desk.executor.graphs  # type: ignore[attr-defined]
    assert list(sizes) == sorted({bucket.tokens for bucket in made.buckets() if bucket.is_mixed})
    for num in (1, 64, 65, 127):
        padded = made.bucket(Packed(0, num, 1), is_special=False).tokens
        assert padded == min(size for size in sizes if size >= num)


def test_what_lies_beside_steps_is_launched_once_and_leaves_nothing_behind() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.9)
    found = []
    for is_rehearsed in (False, True):
        desk = CudaDesk(small_spec(layers=1), host_blocks=4)
        first = desk.prefill(desk.join(0, PROMPT, params))
        assert not is_rehearsed or desk.executor._rehearse_rest()  # type: ignore[attr-defined]
        assert not is_rehearsed or not desk.executor._rehearse_rest()  # type: ignore[attr-defined]
        found.append([*first.tokens, *desk.decode(0, 2), desk.logits()[0].tolist()])
    assert found[0] == found[1]


def test_answers_go_on_in_another_process_when_the_device_is_poisoned(tmp_path: Path) -> None:
    pytest.importorskip("msgspec", reason="an engine process is spoken to by msgspec")
    from headway.cluster.client import FleetClient
    from headway.config import EngineConfig
    from headway.engine.client import Submit
    from headway.engine.supervision import Supervision

    params = [SamplingParams(temperature=0.0, max_tokens=6), SamplingParams(temperature=1.0, max_tokens=5, top_k=30)]
    submits = [Submit(i, [*PROMPT[i:], i], param, seed=i) for i, param in enumerate(params)]

    async def answers() -> tuple[list[list[int]], int]:
        client = FleetClient.start(EngineConfig.of(model=str(tmp_path)), command=CHILD, rules=Supervision(stall_s=0))
        await client.connect()
        try:
            await client.ready()
            streams = [client.submit(submit) for submit in submits]
            found = []
            for stream in streams:
                found.append([])
                async for output in stream:
                    assert output.error is None, output.error
                    found[-1] += output.tokens
            return found, client.num_restarts
        finally:
            await client.close(1.0)

    disturbed, restarts = asyncio.run(answers())
    assert (tmp_path / "poisoned").exists()
    assert restarts == 1
    assert [len(tokens) for tokens in disturbed] == [6, 5]
    assert (disturbed, 0) == asyncio.run(answers()), "an undisturbed engine gives the same"
