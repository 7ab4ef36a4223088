# ruff: noqa: E501  (a mutant is easier to read on one line)
"""`scripts/mutants`: seeded bugs in the scheduler, what it learns and the engine's loop, which their tests must catch.

Each mutant replaces one piece of text in one file of a copy of the package. A mutant whose text is not found makes the
run fail, and so do survivors beyond one in twenty. Tests that do not end in time count as a catch, since some mutants
make the loop run for ever, and are told apart: on a busy machine, run those again. Numbers as arguments run only those.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
CORE = ("parts", "states", "sharing", "admission", "protected", "pausing", "waiting_rows", "scenarios", "machine")
TESTS = {  # by package: those that find most come first
    "core": [f"core/test_{name}.py" for name in CORE],
    "values": ["control", *(f"core/test_{name}.py" for name in CORE)],
    "control": ["control"],
    "engine": [f"engine/test_{name}.py" for name in ("engine", "batching", "stops")],
}


BAR = 0.95  # of the mutants must be caught


class Mutant(NamedTuple):
    what: str
    file: str
    old: str
    new: str | None  # None: nothing is changed


MUTANTS = [
    Mutant("blocks are not released at the end", "core/ledger.py", "self.pool.release(reversed(req.table), self.index.key_of)", "pass"),
    Mutant("a shared block is written without a copy", "core/ledger.py", "self.pool.refs[req.table[i]] > 1", "False"),
    Mutant("a copy-on-write forgets to copy", "core/ledger.py", "        self._copy(BlockRef(Tier.DEVICE, src), BlockRef(Tier.DEVICE, dst))\n", ""),
    Mutant("a prompt cached whole writes the shared block", "core/ledger.py", "        copies_last = len(hits) * self.block_size == len(req.tokens)\n        self", "        copies_last = False\n        self"),
    Mutant("room is counted without the idle blocks a prefix wakes", "core/ledger.py", "room >= len(hits) or room >= self.pool.num_idle_of(hits)", "room >= 0"),
    Mutant("blocks are published before they are computed", "core/ledger.py", "upto = min(req.num_computed // self.block_size, len(req.keys))", "upto = len(req.keys)"),
    Mutant("a fork does not count its references", "core/ledger.py", "        self.pool.share(follower.table)\n", ""),
    Mutant("a swap forgets one block", "core/ledger.py", "for src, dst in zip(req.table, host, strict=False):", "for src, dst in zip(req.table[1:], host[1:], strict=False):"),
    Mutant("host blocks are not given back", "core/ledger.py", "        self.host.release(req.host_table)  #", "        #"),
    Mutant("growth is not all or nothing", "core/ledger.py", "taken = self._take(req, len(shared) + missing)", "taken = self._take(req, len(shared)) if shared else self._take(req, missing)"),
    Mutant("an evicted block stays in the index", "kv/blocks.py", "popitem(last=False)[0]\n        self._on_evict(block)\n", "popitem(last=False)[0]\n"),
    Mutant("sharing does not wake an idle block", "kv/blocks.py", "            if not readers:\n                del self._idle[block]\n", ""),
    Mutant("eviction takes the newest", "kv/blocks.py", "popitem(last=False)", "popitem(last=True)"),
    Mutant("keys do not chain", "kv/prefix.py", "sha256(parent + raw", "sha256(raw"),
    Mutant("the tenant is not in the chain", "kv/prefix.py", "        digest.update(len(raw).to_bytes(8, \"little\") + raw)\n", "        pass\n"),
    Mutant("an aborted request stays in the queue", "core/queue.py", "        if self._ticket.pop(id, None) is None:\n            return False\n", "        if self._ticket.get(id) is None:\n            return False\n"),
    Mutant("preempted requests go to the back", "core/waiting.py", "        if not is_protected and reason is PreemptReason.PRIORITY and not self._policy.resumes_first:\n", "        if True:\n"),
    Mutant("a step beside running rows sheds without limit", "core/phases/admit.py", "if num_moves == MOST_MOVES and state.num_running:", "if False:"),
    Mutant("a head without a victim never looks again", "core/phases/preempt.py", " and state.step % RETRY_AFTER", ""),
    Mutant("a head without a victim looks in every step", "core/phases/preempt.py", "            state.has_no_victim = head.id\n", ""),
    Mutant("urgent prompts are not placed first where memory is short", "core/phases/prefill.py", "sorted(wanting, key=state.policy.rank) if has_room", "wanting if has_room"),
    Mutant("any of the last by key is preempted", "core/phases/preempt.py", " and preempts(head, req, now)", ""),
    Mutant("blocked requests wait for ever", "core/blocked.py", "self._checks.setdefault(self._step + STALLED_AFTER, {})[source.id] = source, source.published", "pass"),
    Mutant("requests do not block on a prefix", "core/blocked.py", "        if rank(source) > rank(req):\n            return False", "        if True:\n            return False"),
    Mutant("a block crossing comes a step late", "core/rows.py", "step + self._block_size - position % self._block_size", "step + 1 + self._block_size - position % self._block_size"),
    Mutant("a row decodes one step too long", "core/rows.py", "self.ends.add(step + left - 1, row)", "self.ends.add(step + left, row)"),
    Mutant("a vacated row keeps its calendar entries", "core/rows.py", "        self.ends.strike(row)\n        self.crossings.strike(row)\n        self.retire(row)\n", "        self.retire(row)\n"),
    Mutant("columns change under a plan that has them", "core/rows.py", "if self._is_handed_out:", "if False:"),
    Mutant("the columns lose a moved row", "core/rows.py", "            self._place[last] = index\n", ""),
    Mutant("tokens in flight of a preempted request still arrive", "core/preemption.py", "    void_in_flight(state, req)\n", ""),
    Mutant("a preempted request is lost", "core/preemption.py", "    state.waiting.resume(req, reason, is_protected(state, req))\n", ""),
    Mutant("an ending row's token goes to its successor", "core/phases/expire.py", "        step.ending[row] = req\n", "        pass\n"),
    Mutant("leases never end", "core/phases/expire.py", "if deadline <= state.now", "if False"),
    Mutant("a request that never fits is accepted", "core/lifecycle.py", "if not ledger.can_ever_hold(req):", "if False:"),
    Mutant("a failed row's token arrives", "core/commit.py", "skip = step.void.union(result.failed) if result.failed else step.void", "skip = step.void"),
    Mutant("void rows are delivered", "core/commit.py", "kept = [i for i, row in enumerate(step.plan.decode) if row not in skip]", "kept = list(range(num_decode))"),
    Mutant("a placed row can be a victim", "core/preemption.py", " if other.row not in plan.placed]", "]"),
    Mutant("the token budget is exceeded by one", "core/admission.py", "state.limits.tokens - state.rows.num_decoding, binding", "state.limits.tokens - state.rows.num_decoding + 1, binding"),
    Mutant("feedback is not awaited", "core/phases/prefill.py", "    if samples:\n        if not req.needs_feedback:\n", "    if samples:\n        if True:\n"),
    Mutant("unused draft blocks are kept as computed", "core/commit.py", "(len(tokens) if is_verified else chunk.count)", "chunk.count"),
    Mutant("a paused row ends as if it had not paused", "core/rows.py", "self.ends.add(end + step - since, row)", "self.ends.add(end, row)"),
    Mutant("a paused row counts the paused steps as tokens", "core/rows.py", "            self._base_step[row] += step - since\n", ""),
    Mutant("a resumed row asks for no block", "core/rows.py", "            self.crossings.add(step, row)\n            self._place_last(req)\n", "            self._place_last(req)\n"),
    Mutant("a paused row is in the plan all the same", "core/rows.py", "            self.retire(req.row)\n", ""),
    Mutant("all rows may pause at once", "core/rows.py", "            if self.num_decoding > 1:\n", "            if True:\n"),
    Mutant("paused rows stay paused though no other row is left", "core/rows.py", " if self._place else set()", ""),
    Mutant("a vacated row is still paused", "core/rows.py", "        if row in self.paused:\n", "        if False:\n"),
    Mutant("a paused row is not counted", "core/rows.py", "len(self._place) + len(self.paused)", "len(self._place)"),
    Mutant("a protected row is an ordinary victim", "core/preemption.py", "    if is_protected(state, req):\n", "    if False:\n"),
    Mutant("a protected request waits among the others", "core/waiting.py", "(self.protected if is_protected else self.resuming)", "self.resuming"),
    Mutant("protected rows need not fit together", "core/admission.py", "if not rows or _fit_together", "if True or _fit_together"),
    Mutant("what has yielded need not fit at its longest", "core/admission.py", " and sum(-(-longest // size) for longest in yielded) <= ledger.num_blocks", ""),
    Mutant("a lone row beside leases preempts itself", "core/preemption.py", " or state.rows.num_running == 1)", ")"),
    Mutant("a protected row is preempted by priority", "core/phases/preempt.py", " if not is_protected(state, req)]", "]"),
    Mutant("what has yielded counts as it did", "core/admission.py", "factor *= 1 +", "factor *= 1 + 0 *"),
    Mutant("peak admission forgets the request itself", "core/admission.py", "(*state.rows.running(), req), state.length_factor", "state.rows.running(), state.length_factor"),
    Mutant("peak admission learns nothing", "core/preemption.py", "factor * 1.05", "factor"),
    Mutant("KV that waits is not taken back", "core/preemption.py", "if (victim is req or is_protected(state, victim)) and reclaim(state, req):", "if False:"),
    Mutant("a chunk of a protected row yields", "core/preemption.py", "and plan.placed and not", "and False and not"),
    Mutant("reserve reserves nothing", "core/admission.py", "return state.limits.admission is Admission.RESERVE or", "return False and"),
    Mutant("rejected drafts lose their reservation", "core/ledger.py", "req.num_reserved += req.is_reserved", "pass"),
    Mutant("a fork reserves nothing", "core/ledger.py", "        if reserves:  #", "        if False:  #"),
    Mutant("a loaded request reserves nothing", "core/ledger.py", "return [] if self._fits([], 0, reserved) else None", "return []"),
    Mutant("reserved blocks go to any request", "core/ledger.py", "if count > self.pool.available - self.num_reserved + req.num_reserved:", "if count > self.pool.available:"),
    Mutant("a freed request keeps its reservation", "core/ledger.py", "        self.num_reserved -= req.num_reserved\n", ""),
    Mutant("KV is loaded into any free block", "core/ledger.py", "self.pool.take_settled(missing)", "self.pool.take(missing)"),
    Mutant("a swap's source is settled at once", "core/ledger.py", "for tier, block in (src, dst):", "for tier, block in (dst,):"),
    Mutant("a released block is settled at once", "kv/blocks.py", "                named[block] = newest\n", "                pass\n"),
    Mutant("settled means handed out", "kv/blocks.py", "self._named[b] <= self.collected", "self._named[b] <= self.newest"),
    Mutant("a settled block stays idle", "kv/blocks.py", "                del self._idle[block]\n                self._on_evict(block)\n", "                pass\n"),
    Mutant("no plan is ever collected", "core/ledger.py", "        self.pool.collected = plan\n", "        pass\n"),
    Mutant("reclaimed KV is kept", "core/lifecycle.py", "    del state.received[req.id]\n    state.ledger.free(req)\n", "    del state.received[req.id]\n"),
    Mutant("loaded KV is computed again", "core/lifecycle.py", "req.num_computed = max(num_here, min(num_tokens, len(req.tokens) - 1))", "req.num_computed = num_here"),
    Mutant("all that was loaded counts as computed", "core/lifecycle.py", "min(num_tokens, len(req.tokens) - 1)", "len(req.tokens) - 1"),
    Mutant("a held request gives its blocks away", "core/lifecycle.py", "() if holds else None", "None"),
    Mutant("followers of a preempted leader are lost", "core/waiting.py", "        for req in self.take_followers(leader):\n            self.push(req)\n", "        self.take_followers(leader)\n"),
    Mutant("an index entry names another prefix", "kv/prefix.py", "if key not in self._block_of and block not in self.key_of:", "if key not in self._block_of:"),
    Mutant("a chunk's pairs ignore what is present", "values/work.py", "(2 * start + count) * count", "count * count"),
    Mutant("chunks are not counted", "core/builder.py", "        self.num_tokens += count\n", ""),
    Mutant("a running request may not be held", "values/states.py", "frozenset({State.WAITING, State.HELD, State.DONE})", "frozenset({State.WAITING, State.DONE})"),
    Mutant("a waiting request may not end", "values/states.py", "frozenset({State.RUNNING, State.DONE})", "frozenset({State.RUNNING})"),
    Mutant("a step's copies cost nothing", "control/costs.py", "            + w.copies * work.copies\n", ""),
    Mutant("costs are never forgotten", "control/costs.py", "_FORGET = 0.999", "_FORGET = 1.0"),
    Mutant("outliers teach", "control/costs.py", "            if kind.outliers < _MOST_OUTLIERS:\n                return True\n", ""),
    Mutant("rare copies are outliers", "control/costs.py", " + 2 * bool(work.copies)", ""),
    Mutant("a fit makes nothing ready", "control/costs.py", "        self.is_ready = True\n", ""),
    Mutant("the margin is not kept", "control/costs.py", " - self.margin\n", "\n"),
    Mutant("a target counts for nothing", "control/pacer.py", "count = self._costs.chunk_within(target, work, start)", "count = 1 << 20"),
    Mutant("an ITL objective is ignored", "control/pacer.py", "min(self.target, itl_target)", "self.target"),
    Mutant("no prompt makes progress", "control/pacer.py", "max(0 if work.tokens else FLOOR,", "max(0,"),
    Mutant("SLO admission has no hold time", "control/slo_admission.py", "if changes and now - since >= HOLD:", "if changes:"),
    Mutant("SLO admission has no margin", "control/slo_admission.py", "self._allowed(req, 0.0), self._allowed(req, MARGIN)", "self._allowed(req, 0.0), self._allowed(req, 0.0)"),
    Mutant("a batch begins while another runs", "control/gates.py", "if num_running or (", "if False or ("),
    Mutant("a window never ends", "control/gates.py", "now - oldest < self.window", "True"),
    Mutant("a cut answer counts as whole", "control/lengths.py", "if is_cut and self.count and value <= self.mean:", "if False:"),
    Mutant("declared lengths are believed", "control/lengths.py", "math.inf, float(PRIOR)", "math.inf, math.inf"),
    Mutant("every tenant has the average of all", "control/lengths.py", "if average.count < 5:", "if True:"),
    Mutant("the backlog keeps requests that left", "control/forecast.py", "            self._add(at, -count)\n", "            pass\n"),
    Mutant("requests behind count as before", "control/forecast.py", "total += sum(known.get(spot, 0) for spot in range(first, at))", "total += sum(known.values())"),
    Mutant("the loop ignores its depth", "engine/engine.py", "len(self._pending) >= self._depth", "len(self._pending) >= 1"),
    Mutant("the waiting queue has no bound", "engine/engine.py", "return self.scheduler.num_waiting < self._most_queued", "return True"),
    Mutant("an abort is not reported", "engine/engine.py", "return None if req is None else self._terminal(req)", "return None"),
    Mutant("what a plan finished is not reported", "engine/engine.py", "            outputs += [self._terminal(req) for req in made.finished]\n", ""),
    Mutant("the end of text ends nothing", "engine/engine.py", "(frozenset() if params.ignore_eos else self._eos)", "frozenset()"),
    Mutant("lengths are not learned", "engine/engine.py", "self.lengths.learn(", "(lambda *_: None)("),
    Mutant("an arrival asks what a request declares", "engine/engine.py", "        return Expected(median, 0.0)  #", "        return Expected(median, float(submit.params.max_tokens))  #"),
    Mutant("log probabilities are lost", "engine/engine.py", "outputs, made.logprobs)", "outputs)"),
    Mutant("any token may be in a prompt", "engine/limits.py", "max(ids) >= vocab", "False"),
    Mutant("tenants share blocks", "engine/engine.py", "chain_seed(self._identity, submit.salt,", "chain_seed(self._identity,"),
]  # fmt: skip


def place_of(mutant: Mutant, package: Path = ROOT / "src" / "headway") -> Path:
    """The file that a mutant changes."""
    return package / mutant.file


def tests_of(mutant: Mutant) -> list[str]:
    """Those that must catch it."""
    package = mutant.file.split("/")[0]
    return [str(ROOT / "tests" / name) for name in TESTS.get(package, TESTS["core"])]


class Verdict(StrEnum):
    CAUGHT = "caught"
    ENDLESS = "endless"  # a livelock is a catch too
    SURVIVED = "SURVIVED"


def run_tests(mutant: Mutant, folder: Path) -> Verdict:
    """What its tests say of a copy of the package that has it."""
    package = folder / "headway"
    shutil.copytree(ROOT / "src" / "headway", package, ignore=shutil.ignore_patterns("__pycache__"))
    path = place_of(mutant, package)
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"mutant {mutant.what!r}: its text occurs {text.count(mutant.old)} times in {mutant.file}")
    if mutant.new is not None:
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT / "tests", ROOT / "tests" / "support", ROOT / "tools"))),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests_of(mutant)]
    try:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return Verdict.ENDLESS
    return Verdict.CAUGHT if done.returncode else Verdict.SURVIVED


def sample(seed: int, count: int) -> list[int]:
    """So many of the mutants, chosen by a seed."""
    return sorted(random.Random(seed).sample(range(len(MUTANTS)), count))


def judge(index: int) -> tuple[int, Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        return index, run_tests(MUTANTS[index], Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("numbers", type=int, nargs="*", help="of the mutants; all if none is given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    wanted = parser.parse_args()
    for package in TESTS:
        unchanged = next(mutant for mutant in MUTANTS if mutant.file.startswith(package))._replace(new=None)
        with tempfile.TemporaryDirectory() as folder:
            if run_tests(unchanged, Path(folder)) is not Verdict.SURVIVED:
                raise SystemExit(f"the tests of {package} fail without any mutant, or do not end")
    chosen, began, verdicts = wanted.numbers or range(len(MUTANTS)), time.monotonic(), Counter[Verdict]()
    with ThreadPoolExecutor(max_workers=wanted.jobs) as pool:
        for index, verdict in pool.map(judge, chosen):
            verdicts[verdict] += 1
            print(f"{index:3} {verdict:8} {MUTANTS[index].what}", flush=True)
    survivors = verdicts[Verdict.SURVIVED]
    print(
        f"{len(chosen) - survivors} of {len(chosen)} mutants caught in {time.monotonic() - began:.0f} s, "
        f"{verdicts[Verdict.ENDLESS]} of them by tests that did not end"
    )
    return 1 if survivors > (1 - BAR) * len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
