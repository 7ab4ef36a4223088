"""Steps in which every token is the greedy choice, masked or not: the model picks them and no logits are read.

It says whether a step is one, and what of each line of its logits is allowed. What it leaves to the sampler, the
sampler does alike, slower.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.models.pick import Allowed
from headway.runner.inputs import StepInputs
from headway.runner.sampler import Masks
from headway.runner.slots import Slots


def is_greedy_step(inputs: StepInputs, slots: Slots, masks: Masks) -> bool:
    """Whether every token of the step is the largest logit's among those that its mask allows."""
    if not slots.all_plain(inputs.rows, inputs.positions):
        return False
    if not masks and not inputs.verifies:
        return not slots.needs_mask[inputs.rows].any()
    rows = [verify.row for verify in inputs.verifies]
    bases = np.array([verify.base for verify in inputs.verifies], np.int64)
    if rows and not slots.all_plain(np.array(rows, np.int64), bases):
        return False
    lines = inputs.index
    if len(np.unique(lines)) < len(lines):  # rows that share a line may have masks of their own
        return False
    masked = masks.keys()
    is_complete = all(len(masks[each.row]) == 1 + len(each.drafts) for each in inputs.verifies if each.row in masked)
    every: NDArray[np.int64] = np.array([*inputs.rows.tolist(), *rows], np.int64)
    return is_complete and masked >= set(every[slots.needs_mask[every]].tolist())


def allowed_tokens(inputs: StepInputs, num_lines: int, masks: Masks) -> Allowed | None:
    """The masks of a greedy step, by the lines of its logits; None: there are none."""
    bits: list[NDArray[np.uint8]] = []
    line_of = np.full(num_lines, -1, np.int32)
    count = 0
    places = [(int(row), int(line)) for row, line in zip(inputs.rows, inputs.index, strict=True)] if masks else []
    places += [(verify.row, verify.first) for verify in inputs.verifies] if masks else []
    for row, line in places:
        mask = masks.get(row)
        if mask is not None:
            bits.append(mask)
            line_of[line : line + len(mask)] = np.arange(count, count + len(mask))
            count += len(mask)
    return Allowed(np.concatenate(bits), line_of) if bits else None
