"""The real server over a device: many streams from clients in processes of their own, beside what it does offline.

The server has made-up weights of the named shape. One process of clients would be busy before a server over a GPU is,
so there are several. Run it by `python -m headway.bench.device_serve`; `python -m headway.bench.device` with as many
rows as there are streams, and temperature 0, gives the figure to compare with.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

from headway.bench.client import Target, run_streams
from headway.bench.console import end
from headway.bench.server import ServerProcess
from headway.bench.workload import WorkItem, chat_mix, read_workload

_NAME = "dummy"


class Clients(NamedTuple):
    """What one process of clients saw; both times are of the clock that all processes share."""

    began: float
    ended: float
    first_s: list[float]
    num_pieces: int
    cpu_s: float


class Round(NamedTuple):
    """All processes together."""

    tok_s: float
    first_s: float  # median
    num_pieces: int
    cpu_s: float  # of the clients


def answer(target: Target, works: Sequence[WorkItem], streams: int, salt: str) -> Clients:
    """Send every request, so many at a time."""
    began, cpu = perf_counter(), process_time()
    found = run_streams(target, works, streams, salt)
    pieces = sum(len(stream.arrivals) for stream in found)
    return Clients(began, perf_counter(), [stream.first_s for stream in found], pieces, process_time() - cpu)


def run_round(pool: ProcessPoolExecutor, target: Target, works: Sequence[WorkItem], shares: Sequence[int]) -> Round:
    """Split the requests among processes with so many streams each."""
    num = len(shares)
    jobs = [pool.submit(answer, target, works[i::num], shares[i], f"clients-{i}") for i in range(num)]
    seen = [job.result() for job in jobs]
    first = sorted(value for clients in seen for value in clients.first_s)
    wall = max(clients.ended for clients in seen) - min(clients.began for clients in seen)
    return Round(
        tok_s=sum(work.max_tokens for work in works) / wall,
        first_s=first[len(first) // 2],
        num_pieces=sum(clients.num_pieces for clients in seen),
        cpu_s=sum(clients.cpu_s for clients in seen),
    )


def server_flags(args: argparse.Namespace) -> list[str]:
    """A server with made-up weights that has a slot for every stream."""
    flags = {
        "device": args.device,
        "model": args.model,
        "model-shape": args.shape,
        "served-model-name": _NAME,
        "max-waiting": args.requests,
        "max-num-seqs": args.streams,
        "max-num-batched-tokens": max(args.streams, args.tokens),
        "max-model-len": args.max_len,
        "num-blocks": args.blocks,
    }
    given = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
    return [*given, "--dummy-weights", "--no-prefix-caching"]


def run(args: argparse.Namespace) -> list[Round]:
    """Every round's figures, printed as they come."""
    works = read_workload(args.workload, args.requests) if args.workload else chat_mix(args.requests, 0)
    # Processes are made before any of the threads that a client has.
    pool = ProcessPoolExecutor(args.processes, mp_context=multiprocessing.get_context("spawn"))
    shares = [len(range(i, args.streams, args.processes)) for i in range(args.processes)]
    rounds = []
    with pool, ServerProcess(server_flags(args)) as server:
        print(f"ready {server.ready_s:.1f} s after its process was started", flush=True)
        target = Target.of(server.url, _NAME)
        for number in range(args.rounds):
            rounds.append(run_round(pool, target, works, shares))
            seen = rounds[-1]
            print(
                f"round {number + 1}: {seen.tok_s:,.0f} output tok/s over {args.streams} streams from {args.processes} "
                f"processes; TTFT P50 {seen.first_s * 1e3:.0f} ms; {seen.num_pieces} pieces; clients' processor time "
                f"{seen.cpu_s:.1f} s",
                flush=True,
            )
    if args.offline is not None:
        print(f"{rounds[-1].tok_s / args.offline:.3f} of {args.offline:,.0f} offline")
    return rounds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory with config.json and tokenizer.json")
    parser.add_argument("--shape", help="the model's own sizes if not given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--workload", type=Path, help="a file of JSON lines with tokens and max_tokens; chat-mix if not given"
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=40_000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--offline", type=float, help="output tok/s of the engine without the server")
    run(parser.parse_args(argv))


if __name__ == "__main__":
    end(main)
