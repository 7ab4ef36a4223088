"""How kernels of this package are launched: the device's size, and dependent launch where the device has it.

Owns nothing but numbers. Triton's interpreter on the CPU is a device with few multiprocessors and no dependent launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel of a dependent launch waits for its predecessor itself, by `wait_for_inputs`, before it reads or writes
    anything that another kernel of the step touches."""

    num_sms: int
    is_dependent: bool
    is_early: bool = True  # a successor may come while its predecessor still computes; else when its programs end

    def options(self, *, is_small: bool = False) -> dict[str, object]:
        """Keyword arguments of a launch; after a kernel that `is_small` the next one always comes early."""
        return {"PDL": 1 + (self.is_early or is_small), "launch_pdl": True} if self.is_dependent else {"PDL": 0}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL > 1:
        # After the wait: successors that came earlier would hold registers that this kernel's predecessors still need.
        tl.extra.cuda.gdc_launch_dependents()


def pow2(number: int) -> int:
    """The smallest power of two that is not less: Triton's vectors have such lengths."""
    return int(triton.next_power_of_2(number))
