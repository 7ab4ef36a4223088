"""How often a forced call is one of the right function: questions of BFCL, of which each has one right function.

    tools/right_calls.py --url http://127.0.0.1:8000 --data BFCL_v4_multiple.json --answers ANSWERS.json

Both files are in the package bfcl-eval. At least three functions are offered with each question, those of the next ones
where it has fewer; `tool_choice` is `required`, answers are greedy. Prints what was wrong and a line with the counts;
exits with 1 if a call does not have its form.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LEAST = 3
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}


def schema(given: Any) -> Any:
    """A schema of BFCL, which has Python's names of types, as JSON schema."""
    if isinstance(given, list):
        return [schema(each) for each in given]
    if not isinstance(given, dict):
        return given
    found = {name: schema(value) for name, value in given.items() if name not in ("optional", "default")}
    if isinstance(found.get("type"), str):
        found["type"] = TYPES.get(found["type"], found["type"])
        if found["type"] is None:
            del found["type"]
    return found


def main() -> int:
    args = _arguments()
    questions = [json.loads(line) for line in args.data.read_text().splitlines() if line.strip()]
    answers = {each["id"]: each for each in map(json.loads, args.answers.read_text().splitlines())}
    num_right = num_formed = num_done = 0
    with ThreadPoolExecutor(args.at_once) as pool:
        numbers = range(min(args.num, len(questions)))
        for number, (name, is_formed) in zip(
            numbers, pool.map(lambda at: ask(args, questions, at), numbers), strict=True
        ):
            (truth,) = answers[questions[number]["id"]]["ground_truth"]
            num_done, num_formed = num_done + 1, num_formed + is_formed
            num_right += name in truth
            if name not in truth:
                print(f"{questions[number]['id']}: {name} instead of {', '.join(truth)}", flush=True)
            if not num_done % 20:
                print(f"{num_right} of {num_done}", file=sys.stderr, flush=True)
    print(f"right function: {num_right} of {num_done}; calls that have their form: {num_formed}")
    return 0 if num_formed == num_done else 1


def ask(args: argparse.Namespace, questions: list[dict[str, Any]], at: int) -> tuple[str, bool]:
    """The name of the function that was called, and whether the call has its form."""
    offered: dict[str, Any] = {}
    for step in range(len(questions)):
        if not step or len(offered) < LEAST:
            offered |= {each["name"]: each for each in questions[(at + step) % len(questions)]["function"]}
    tools = [
        {"type": "function", "function": {**each, "parameters": schema(each["parameters"])}}
        for each in offered.values()
    ]
    body = {
        "messages": questions[at]["question"][0],
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 300,
    }
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{args.url}/v1/chat/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=1200) as response:
        choice = json.load(response)["choices"][0]
    (one,) = choice["message"]["tool_calls"]
    try:
        arguments = json.loads(one["function"]["arguments"])
    except ValueError:
        arguments = None
    return one["function"]["name"], choice["finish_reason"] == "tool_calls" and isinstance(arguments, dict)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of a server")
    parser.add_argument("--data", type=Path, required=True, help="questions with their functions")
    parser.add_argument("--answers", type=Path, required=True, help="the right calls")
    parser.add_argument("--num", type=int, default=200, help="questions")
    parser.add_argument("--at-once", type=int, default=8, help="requests at a time")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
