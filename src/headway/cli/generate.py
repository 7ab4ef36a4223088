"""`headway generate`: answers to many prompts, offline. Owns reading prompts and printing answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.args import BatchFlags, BatchSampling, Common, CommonFlags, EngineFlags, EngineOptions, Switch
from headway.cli.choice import describe
from headway.cli.terminal import progress
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.llm import Completion

EXAMPLES = """Examples:
  headway generate "Once upon a time" --max-tokens 64
  headway generate "What is a block table?" --chat --temperature 0
  headway generate --file prompts.txt --json > answers.jsonl
  printf 'One\\nTwo\\n' | headway generate - --model model.gguf --n 2 --seed 1"""


def generate(
    *prompts: str,
    file: str | None = None,
    chat: Switch = False,
    json: Switch = False,
    sampling: BatchFlags = BatchSampling(),
    engine: EngineFlags = EngineOptions(),
    common: CommonFlags = Common(),
) -> int:
    """Answer prompts offline, in this process, as one batch.

    Parameters
    ----------
    prompts
        Texts to go on with.
    file
        Read prompts from a file, one per line; - is standard input. In a .jsonl file a line is a JSON string
        or an object with "prompt".
    chat
        Take each prompt as a user's message and apply the model's chat template.
    json
        Print one JSON object per prompt, with token ids, finish reasons and timings.
    """
    config = engine.config(None)
    if common.print_config:
        print(describe(config))
        return 0
    given = sampling.given()
    texts = [*prompts, *(read_prompts(file) if file else ())]
    if not texts:
        raise ConfigError("no prompt was given; name one, or use --file FILE, or - for standard input")
    from headway.llm import LLM  # imports the engine, which takes a moment

    llm = LLM(config=config)
    try:
        with progress("generating", len(texts) * sampling.n) as update:
            if chat:
                completions = llm.chat([[{"role": "user", "content": text}] for text in texts], given, update)
            else:
                completions = llm.generate(texts, given, update)
    finally:
        llm.close()
    for index, completion in enumerate(completions):
        show(completion, as_json=json, title=f"[{index + 1}/{len(texts)}] " if len(texts) > 1 else "")
    return 0


def read_prompts(file: str) -> list[str]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts from {file}: {error}") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not file.endswith(".jsonl"):
        return lines
    return [_from_json(line, f"{file}, prompt {number}") for number, line in enumerate(lines, 1)]


def _from_json(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ConfigError(f'{where} is {line[:80]}; allowed: a string, or an object with a string "prompt"')
    return prompt


def show(completion: Completion, *, as_json: bool, title: str) -> None:
    if as_json:
        print(json.dumps(to_json(completion)))
        return
    answers: Sequence[Any] = completion.outputs
    for answer in answers:
        label = title + (f"answer {answer.index + 1}: " if len(answers) > 1 else "")
        print(f"{label}{answer.text}")


def to_json(completion: Completion) -> dict[str, Any]:
    return {
        "prompt": completion.prompt,
        "num_prompt_tokens": len(completion.prompt_tokens),
        "num_cached_tokens": completion.num_cached,
        "outputs": [
            {
                "index": answer.index,
                "text": answer.text,
                "token_ids": list(answer.token_ids),
                "finish_reason": answer.finish_reason,
                "logprobs": [entry._asdict() for entry in answer.logprobs] if answer.logprobs else None,
            }
            for answer in completion.outputs
        ],
        "timing": asdict(completion.timing) if completion.timing else None,
    }
