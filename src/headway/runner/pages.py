"""Memory for what is read over and over: anonymous pages, zero at first, large ones where the system has them.

With small pages a step that reads all weights spends a tenth of its time on looking up addresses.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

LARGE_PAGE = 2**21


def reserve(num_bytes: int, *, is_large: bool) -> mmap.mmap:
    """Pages that cost memory once they are touched, large ones two megabytes at a time; OSError: there are not so many.

    A private anonymous mapping, because an allocator guarantees neither zeros nor untouched pages.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_large and sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
