# ruff: noqa: E501  (a mutant is easier to read on one line)
"""`scripts/mutants`: seeded bugs, each of which the core's tests must catch.

Each mutant replaces one piece of text in one file of a copy of the package; a mutant whose text is not found, or
that survives, makes the run fail. Numbers as arguments run only those.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TESTS = (
    "test_parts.py",
    "test_states.py",
    "test_sharing.py",
    "test_scenarios.py",
    "test_seating.py",
    "test_resting.py",
    "test_machine.py",
)


class Mutant(NamedTuple):
    what: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant("blocks are not released at the end", "ledger.py", "self.pool.release(reversed(req.table), self.index)", "pass"),
    Mutant("a shared block is written without a copy", "ledger.py", "self.pool.refs(req.table[i]) > 1", "False"),
    Mutant("a copy-on-write forgets to copy", "ledger.py",
           "            self._copy_device(req.table[index], own)\n", ""),
    Mutant("a prompt cached whole writes the shared block", "ledger.py",
           "        copies_last = len(hits) * self.block_size == len(req.tokens)\n        self", "        copies_last = False\n        self"),
    Mutant("room is counted without the idle blocks a prefix wakes", "ledger.py",
           "self.pool.available - self.promised - woken", "self.pool.available - self.promised"),
    Mutant("blocks are published before they are computed", "ledger.py",
           "upto = min(req.computed // self.block_size, len(req.keys))", "upto = len(req.keys)"),
    Mutant("a fork does not count its references", "ledger.py",
           "        self.pool.share(follower.table)\n", ""),
    Mutant("a swap forgets one block", "ledger.py",
           "for src, dst in zip(req.table, host, strict=False):", "for src, dst in zip(req.table[1:], host[1:], strict=False):"),
    Mutant("host blocks are not given back", "ledger.py", "        self.host.release(req.host_table)  #", "        #"),
    Mutant("growth is not all or nothing", "ledger.py",
           "taken = self._take(req, len(shared) + missing)", "taken = self._take(req, len(shared)) if shared else self._take(req, missing)"),
    Mutant("an evicted block stays in the index", "blocks.py", "popitem(last=False)[0]\n        self._on_evict(block)\n", "popitem(last=False)[0]\n"),
    Mutant("sharing does not wake an idle block", "blocks.py", "            if not refs[block]:\n                del self._idle[block]\n", ""),
    Mutant("eviction takes the newest", "blocks.py",
           "popitem(last=False)", "popitem(last=True)"),
    Mutant("keys do not chain", "prefix.py", "sha256(parent + array", "sha256(array"),
    Mutant("the tenant is not in the chain", "prefix.py",
           "        digest.update(len(raw).to_bytes(8, \"little\") + raw)\n", "        pass\n"),
    Mutant("an aborted waiter stays in the line", "queue.py",
           "        if self._ticket.pop(id, None) is None:\n            return False\n", "        if self._ticket.get(id) is None:\n            return False\n"),
    Mutant("the preempted go to the back", "waiting.py", "        if not is_protected and not is_lack and not self._policy.resumes_first:\n", "        if True:\n"),
    Mutant("waiters wait for ever", "blocked.py", "self._checks.setdefault(self.step + PATIENCE, []).append(key)", "pass"),
    Mutant("waiters do not wait", "waiting.py", "if source is None or not self.blocked", "if True or not self.blocked"),
    Mutant("a block crossing comes a step late", "rows.py",
           "step + self._block_size - cell % self._block_size", "step + 1 + self._block_size - cell % self._block_size"),
    Mutant("a row decodes one step too long", "rows.py", "self.ends.add(step + left - 1, row)", "self.ends.add(step + left, row)"),
    Mutant("a vacated row keeps its calendar entries", "rows.py", "        self.ends.strike(row)\n        self.crossings.strike(row)\n        self.retire(row)\n", "        self.retire(row)\n"),
    Mutant("columns change under a plan that has them", "rows.py", "if self._is_handed_out:", "if False:"),
    Mutant("the columns forget who moved", "rows.py", "            self._place[last] = index\n", ""),
    Mutant("tokens in flight of a preempted request still arrive", "preempt.py", "    void_in_flight(state, req)\n", ""),
    Mutant("a preempted request is lost", "preempt.py", "    state.waiting.resume(req, is_lack, is_protected(state, req))\n", ""),
    Mutant("an ending row's token goes to its successor", "phases/expire.py", "        step.ending[row] = req\n", "        pass\n"),
    Mutant("leases never end", "phases/expire.py", "if deadline <= state.now", "if False"),
    Mutant("a request that never fits is accepted", "lifecycle.py", "if not ledger.can_ever_hold(req):", "if False:"),
    Mutant("a failed row's token arrives", "commit.py",
           "skip = step.void.union(result.failed) if result.failed else step.void", "skip = step.void"),
    Mutant("void rows are delivered", "commit.py",
           "kept = [i for i, row in enumerate(step.plan.decode) if row not in skip]", "kept = list(range(num_decode))"),
    Mutant("a placed row can be a victim", "preempt.py", " if other.row not in plan.placed]", "]"),
    Mutant("the token budget is exceeded by one", "budget.py",
           "room = state.limits.tokens - state.rows.num_decoding\n", "room = state.limits.tokens - state.rows.num_decoding + 1\n"),
    Mutant("feedback is not awaited", "phases/prefill.py", "    if samples:\n        if not req.needs_feedback:\n", "    if samples:\n        if True:\n"),
    Mutant("unused draft blocks are kept as computed", "commit.py",
           "(len(tokens) if chunk.samples is Samples.VERIFY else chunk.count)", "chunk.count"),
    Mutant("who rests ends as if it had not", "rows.py", "self.ends.add(end + step - since, row)", "self.ends.add(end, row)"),
    Mutant("who rests loses the cells in between", "rows.py", "            self._base_step[row] += step - since\n", ""),
    Mutant("who comes back asks for no block", "rows.py", "            self.crossings.add(step, row)\n", ""),
    Mutant("who rests is in the plan all the same", "rows.py", "                self.retire(req.row)\n", ""),
    Mutant("everybody may rest at once", "rows.py", "if self.is_decoding(req.row) and self.num_decoding > 1:", "if self.is_decoding(req.row):"),
    Mutant("those who rest stay out though nobody else is left", "rows.py", " if self._place else set()", ""),
    Mutant("a vacated row still rests", "rows.py", "        self.resting.pop(row, None)\n", ""),
    Mutant("who rests is not counted", "rows.py", "self.num_decoding + len(self.resting)", "self.num_decoding"),
]  # fmt: skip


def place_of(mutant: Mutant, package: Path = ROOT / "src" / "headway") -> Path:
    """The file that a mutant changes."""
    return package / ("kv" if mutant.file in ("blocks.py", "prefix.py") else "core") / mutant.file


def survives(mutant: Mutant, folder: Path) -> bool:
    package = folder / "headway"
    shutil.copytree(ROOT / "src" / "headway", package, ignore=shutil.ignore_patterns("__pycache__"))
    path = place_of(mutant, package)
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"mutant {mutant.what!r}: its text stands {text.count(mutant.old)} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    tests = [str(ROOT / "tests" / "core" / name) for name in TESTS]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT / "tests", ROOT / "tests" / "support", ROOT / "tools"))),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
    try:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return False  # a livelock is a catch too
    return done.returncode == 0


def main() -> int:
    chosen = [int(arg) for arg in sys.argv[1:]] or range(len(MUTANTS))
    began = time.monotonic()

    def judge(index: int) -> tuple[int, bool]:
        with tempfile.TemporaryDirectory() as folder:
            return index, survives(MUTANTS[index], Path(folder))

    survivors = 0
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for index, alive in pool.map(judge, chosen):
            survivors += alive
            print(f"{index:3} {'SURVIVED' if alive else 'caught  '} {MUTANTS[index].what}", flush=True)
    total = len(list(chosen))
    print(f"{total - survivors} of {total} mutants caught in {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
