"""How often the default settings answer the README's question right: by the API and in `headway chat`, seeds 0 to 19.

    .venv/bin/python tools/first_answer.py [--seeds 20] [serve options]

Only the seed is given, so every other value is the default of the model. An answer is right if its first sentence names
Paris. Prints a table of the answers as Markdown and exits 1 if fewer than 15 of 20 are right in either way.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.request import Request, urlopen

QUESTION = "What is the capital of France?"
HEADWAY = (sys.executable, "-m", "headway.cli.main")
BAR = 0.75


def is_right(answer: str) -> bool:
    return "Paris" in re.split(r"(?<=[.!?])\s", answer.strip(), maxsplit=1)[0]


@contextmanager
def server(options: Sequence[str]) -> Iterator[str]:
    """The URL of a server of its own."""
    with subprocess.Popen([*HEADWAY, "serve", "--port", "0", *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = next((url for line in process.stdout if (url := re.search(r"http://\S+", line))), None)
            if found is None:
                raise SystemExit("the server did not start")
            yield found.group()
        finally:
            process.terminate()


def by_api(url: str, seed: int) -> str:
    body = {"messages": [{"role": "user", "content": QUESTION}], "seed": seed}
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=600) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def by_chat(options: Sequence[str], seed: int) -> str:
    command = [*HEADWAY, "chat", QUESTION, "--seed", str(seed), *options]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    args, options = parser.parse_known_args()
    with server(options) as url:
        api = [by_api(url, seed) for seed in range(args.seeds)]
    chat = [by_chat(options, seed) for seed in range(args.seeds)]
    print("| seed | API | chat |\n|---|---|---|")
    for seed, pair in enumerate(zip(api, chat, strict=True)):
        cells = (("right: " if is_right(text) else "wrong: ") + " ".join(text.split())[:70] for text in pair)
        print(f"| {seed} | {' | '.join(cells)} |")
    counts = [sum(map(is_right, texts)) for texts in (api, chat)]
    print(f"| right | {counts[0]} of {args.seeds} | {counts[1]} of {args.seeds} |")
    return 0 if min(counts) >= BAR * args.seeds else 1


if __name__ == "__main__":
    sys.exit(main())
