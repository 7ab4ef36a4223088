"""How kernels of this package are launched: the device's size, and dependent launch where the device has it.

Owns nothing but numbers. Triton's interpreter on the CPU is a device with few multiprocessors and no dependent launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

AT_END, AT_START, AFTER_READING = 1, 2, 3
"""When a kernel lets its successor come: when its programs end, as soon as they have their inputs, or when the last of
them has read its weights."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel of a dependent launch waits for its predecessor itself, by `wait_for_inputs`, before it writes anything
    and before it reads what its predecessor wrote. What was written before that it may read earlier: no kernel lets its
    successor come before it has waited itself."""

    num_sms: int
    is_dependent: bool
    is_early: bool = True  # a successor comes at the start of its predecessor, whatever that one says

    def options(self, successor: int = AT_END) -> dict[str, object]:
        """Keyword arguments of a launch."""
        if not self.is_dependent:
            return {"PDL": 0}
        return {"PDL": AT_START if self.is_early else successor, "launch_pdl": True}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 2:
        # After the wait: successors that came earlier would hold registers that this kernel's predecessors still need,
        # and could not rely on what those wrote.
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def end_of_reading(PDL: tl.constexpr):
    if PDL == 3:
        tl.extra.cuda.gdc_launch_dependents()


def pow2(number: int) -> int:
    """The smallest power of two that is not less: Triton's vectors have such lengths."""
    return int(triton.next_power_of_2(number))
