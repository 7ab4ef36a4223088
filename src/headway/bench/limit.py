"""The roofline of a workload: how many output tokens a second no engine on this machine can beat.

    limit = output tokens / sum over the steps of max(compute of the step, one read of the weights)

The steps are those of an ideal scheduler. Every slot is filled at once; a prompt is computed whole, in one step
together with all rows that decode, and yields its first token there; from then on a row computes one token per step.
An answer's last token is not computed, since nothing follows from it. Compute is the multiplications with matrices
alone: two operations per weight and token in the layers, and the head for rows that sample only. Attention, norms,
sampling and the reading of KV count as free, so the bound is a little too high and never too low.

With all of 32, 64 and 128 chat-mix requests of seed 0 running, 220 GFLOP/s and 20 GB/s, SmolLM2-135M in float32
is bound by 300, 324 and 365 tokens a second. Pure arithmetic: what the machine can do is measured in `machine`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headway.bench.workload import WorkItem
from headway.models.spec import ModelSpec

BYTES_PER_WEIGHT: Mapping[str, float] = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "q4": 0.625}
"""Of a matrix that is kept in that format: q4 has four bits, and a scale and a minimum of two bytes each for 32
weights. float32 counts as four bytes also where the kernels keep a file's 4-bit groups and read a sixth of that: it is
the limit of float32 as others have it."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step computes."""

    tokens: int
    samples: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine can do at most."""

    flops: float  # multiplications and additions per second
    read_bytes: float  # per second


@dataclass(frozen=True, slots=True)
class Matrices:
    """A model's weights, counted: those every token is multiplied with, and the head's."""

    layers: int
    head: int
    num_bytes: float

    @staticmethod
    def of(spec: ModelSpec, dtype: str) -> Matrices:
        qkv_and_o = spec.hidden * (spec.q_size + 2 * spec.kv_size) + spec.q_size * spec.hidden
        layers = spec.layers * (qkv_and_o + 3 * spec.hidden * spec.intermediate)
        head = spec.hidden * spec.vocab_size
        return Matrices(layers, head, (layers + head) * BYTES_PER_WEIGHT[dtype])

    def seconds(self, step: StepShape, machine: Machine) -> float:
        flops = 2 * (self.layers * step.tokens + self.head * step.samples)
        return max(flops / machine.flops, self.num_bytes / machine.read_bytes)


def ideal_steps(works: Sequence[WorkItem], slots: int) -> Iterator[StepShape]:
    """The steps of the ideal scheduler, which admits requests in their order."""
    waiting = deque((len(work.tokens), work.max_tokens) for work in works)
    left: list[int] = []  # tokens each decoding row still has to yield
    while waiting or left:
        tokens = len(left)
        left = [count - 1 for count in left]
        while waiting and len(left) < slots:
            num_prompt, num_answer = waiting.popleft()
            tokens += num_prompt
            left.append(num_answer - 1)
        yield StepShape(tokens, samples=len(left))
        left = [count for count in left if count]


def limit(works: Sequence[WorkItem], slots: int, matrices: Matrices, machine: Machine) -> float:
    """Output tokens per second."""
    seconds = sum(matrices.seconds(step, machine) for step in ideal_steps(works, slots))
    return sum(work.max_tokens for work in works) / seconds
