"""The process that tries out grammars: what came with a request may be made to take for ever.

Run as a script by `check`; imports llguidance and nothing of headway, so that it stays small. One JSON line in gives
one JSON line out, in order:

    {"tokenizer": path, "vocab_size": …, "eos_ids": […], "parser": {…}, …limits}   ->  {"ready": true}   at the start
    {"grammar": text, "lenient": text or null}                  ->  {"grammar": text, "warnings": […]}
                                                                or  {"error": …}

each with "cpu_s", the CPU time of the process so far. The grammar that comes back is the one to use: the lenient one
where the other cannot be compiled, and Lark's notation where it came in another one.
"""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import sys
import time
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark


class Heap(ctypes.Structure):
    """What glibc's `mallinfo2` tells."""

    _fields_ = [(f"word{at}", ctypes.c_size_t) for at in range(10)]


def in_use() -> int:
    """Bytes of the heap that are in use; 0 where the C library does not say."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = Heap
    heap = ask()
    return int(heap.word4 + heap.word7)  # hblkhd: mapped for themselves, and uordblks: within the arenas


def in_lark(text: str) -> str:
    """The same with its context-free grammar in Lark's notation, if it has one in GBNF's."""
    wanted = json.loads(text)
    for grammar in wanted["grammars"]:
        if "::=" in grammar.get("lark_grammar", ""):
            grammar["lark_grammar"] = any_to_lark(grammar["lark_grammar"])
    return json.dumps(wanted)


def tried(tokens: Any, limits: Any, most_bytes: int, text: str) -> tuple[str, list[str]]:
    """Why it cannot be compiled, else empty; and what it leaves out. The first mask is a part of the cost."""
    before = in_use()
    matcher = llguidance.LLMatcher(tokens, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error() and (took := in_use() - before) > most_bytes:
        return f"it takes {took >> 20} MiB when compiled; allowed: up to {most_bytes >> 20}", []
    return matcher.get_error(), matcher.get_grammar_warnings()


def answer(tokens: Any, limits: Any, most_bytes: int, asked: dict[str, Any]) -> dict[str, object]:
    """One answer line for one grammar."""
    try:
        text = in_lark(asked["grammar"])
        error, warnings = tried(tokens, limits, most_bytes, text)
        if error and asked["lenient"]:
            text = asked["lenient"]
            error, warnings = tried(tokens, limits, most_bytes, text)
        return {"error": error[:1000]} if error else {"grammar": text, "warnings": warnings[:20]}
    except MemoryError:
        return {"error": "it takes too much memory"}
    except RecursionError:
        return {"error": "it nests too deeply"}
    except Exception as error:  # whatever a grammar does wrong is an answer, not the end of this process
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def say(line: dict[str, object]) -> None:
    """Answer; the CPU time so far tells the parent a busy process from a stopped one."""
    sys.stdout.write(json.dumps({**line, "cpu_s": time.process_time()}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until the parent closes our input."""
    for sig in (signal.SIGINT, signal.SIGHUP):  # the terminal's signals are the parent's to handle; it closes our input
        signal.signal(sig, signal.SIG_IGN)
    setup = json.loads(sys.stdin.readline() or "null")
    if setup is None:
        return
    if sys.platform != "darwin":  # a process of macOS begins with more address space than any useful limit allows
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    signal.setitimer(signal.ITIMER_REAL, setup["start_s"])
    limits = llguidance.LLParserLimits(**setup["parser"])
    tokens = llguidance.LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos_ids"])
    most_bytes = setup["grammar_bytes"]
    answer(
        tokens, limits, most_bytes, {"grammar": '{"grammars": [{"json_schema": {}}]}', "lenient": None}
    )  # it warms up
    signal.setitimer(signal.ITIMER_REAL, 0)
    say({"ready": True})
    for line in sys.stdin:
        # The default action of the alarm ends the process, should the parent have died meanwhile.
        signal.setitimer(signal.ITIMER_REAL, setup["alarm_s"])
        say(answer(tokens, limits, most_bytes, json.loads(line)))
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
