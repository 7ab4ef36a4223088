"""An explanation in plain words: what the journal knows of a request, told in the order in which it happened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headway.engine.explain import DECODE, PAUSED, PREFILL, REPORT, STEP, Explanation, PreemptionNote, WaitNote

REASONS: Mapping[str, str] = {
    "slots": "every slot of the batch was taken",
    "tokens": "the token budget of each step was used up by prompts under way",
    "blocks": "too few KV blocks were free",
    "pacing": "one more row would have broken the latency target or an ITL objective of a running request",
    "barrier": "the batch had not ended or was not full: static or dynamic batching",
    "prefix": "a running request was computing the same prefix, which it then did not have to compute again",
    "loading": "KV of its prompt was on the way from elsewhere",
    "grammar": "the grammar of its answer was being compiled",
    STEP: "a step was running when it came; requests join between steps",
    "waiting": "it waits now",
    PREFILL: "its prompt was computed",
    DECODE: "its answer was generated",
    PAUSED: "its row skipped steps for requests with a tighter ITL objective",
    REPORT: "its end was reported later: a static batch ends together, or the engine was busy",
}


def words(told: Explanation) -> list[str]:
    """Sentences, in the order of events."""
    return [*_sentences(told)]


def _sentences(told: Explanation) -> Iterator[str]:
    since = "since the engine that had it first was replaced" if told.is_resumed else "in all"
    yield f"It took {_time(told.total_s)} {since}" + (
        f" and ended with {told.finish!r}." if told.finish else " so far."
    )
    if told.routed is not None:
        scores = ", ".join(f"{name} {score:g}" for name, score in told.routed.scores.items())
        yield f"Replica {told.routed.replica} got it: {told.routed.why}" + (f" ({scores})." if scores else ".")
    waits = list(told.waits)
    if waits:
        yield from _waited("before it was admitted", waits.pop(0))
    if told.num_overtaken:
        yield (
            f"{told.num_overtaken} requests that came later were admitted before it: the policy puts them first, or "
            "they fitted where it did not."
        )
    if told.num_cached:
        yield f"{told.num_cached} of its {told.num_prompt} prompt tokens were in the prefix cache."
    if told.num_chunks:
        steps = "one chunk" if told.num_chunks == 1 else f"{told.num_chunks} chunks"
        until = f", in {_time(told.parts_s[PREFILL])} up to its first token" if PREFILL in told.parts_s else ""
        yield f"Its tokens were computed in {steps}{until}."
    for number, note in enumerate(told.preemptions):
        yield _preempted(note)
        if number < len(waits):
            yield from _waited("after that preemption", waits[number])
    if told.tokens_recomputed:
        yield f"{told.tokens_recomputed} tokens were computed again after preemptions."
    if PAUSED in told.parts_s:
        yield f"For {_time(told.parts_s[PAUSED])} {REASONS[PAUSED]}."
    if told.ttft_s is not None:
        yield _first(told)
    yield f"It used {_time(told.device_s)} of the device and {told.kv_block_s:.3g} KV block-seconds."


def _waited(when: str, wait: WaitNote) -> Iterator[str]:
    reasons = sorted(wait.reasons, key=lambda note: -note.seconds)
    if not reasons or wait.seconds <= 0.0:
        return
    told = "; ".join(f"{_time(note.seconds)}: {REASONS[note.reason]}" for note in reasons)
    yield f"It waited {_time(wait.seconds)} {when} ({told})."
    seen = wait.meanwhile
    if seen.steps:
        yield (
            f"Meanwhile {seen.steps} steps ran with {seen.running:.3g} requests in the batch and {seen.waiting:.3g} "
            f"waiting: {seen.prompt_tokens} prompt tokens computed, {seen.generated_tokens} tokens generated, "
            f"{seen.admitted} requests admitted, at least {seen.least_free_blocks} blocks free."
        )


def _preempted(note: PreemptionNote) -> str:
    why = "blocks ran out" if note.reason == "memory" else "a more urgent request took its place"
    kept = "swapped to host memory" if note.is_swapped else "given up, but for what the prefix cache kept"
    return f"After {_time(note.at_s)} it was preempted: {why}; the KV of {note.tokens_lost} tokens was {kept}."


def _first(told: Explanation) -> str:
    assert told.ttft_s is not None
    said = f"Its first token came after {_time(told.ttft_s)}"
    if told.predicted_ttft_s is None:
        return said + "; when it came, too little was known to predict that."
    return said + f"; {_time(told.predicted_ttft_s)} were predicted when it came."


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"
