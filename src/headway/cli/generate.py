"""`headway generate`: answers to prompts, offline. Owns reading prompts and printing answers."""

from __future__ import annotations

import json as jsonlib
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.cli.args import BatchFlags, BatchSampling, Common, CommonFlags, EngineFlags, EngineOptions, Switch
from headway.cli.choice import describe, only_adapter
from headway.cli.terminal import Bar, held_interrupts, progress, spinner
from headway.cli.wrap import Wrapper
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.llm import LLM, Completion

Check = Callable[[], None]  # raises if Ctrl-C has come

EXAMPLES = """Examples:
  headway generate "Once upon a time" --max-tokens 64
  headway generate "What is a block table?" --chat --temperature 0
  echo "Once upon a time" | headway generate
  headway generate --file prompts.txt --output jsonl > answers.jsonl
  printf 'One\\nTwo\\n' | headway generate --model model.gguf --n 2 --seed 1"""


def generate(
    *prompts: str,
    file: str | None = None,
    chat: Switch = False,
    output: Literal["text", "jsonl"] | None = None,
    json: Switch = False,
    sampling: BatchFlags = BatchSampling(),
    engine: EngineFlags = EngineOptions(),
    common: CommonFlags = Common(),
) -> int:
    """Answer prompts offline, in this process, as one batch.

    The answer to a single prompt appears as it is generated. Ctrl-C ends the run; answers that have ended are written.

    Parameters
    ----------
    prompts
        Texts to go on with; without any, they are read from standard input if that is a pipe or a file.
    file
        Read prompts from a file, one per line; - is standard input. In a .jsonl file a line is a JSON string
        or an object with "prompt".
    chat
        Take each prompt as a user's message and apply the model's chat template.
    output
        text: the answers alone; jsonl: a JSON object per answer, with prompt, text, finish_reason and tokens.
    json
        A JSON object per prompt, with token ids, log probabilities and timings.
    """
    config = engine.config(None)
    if common.print_config:
        print(describe(config))
        return 0
    if json and output is not None:
        raise ConfigError(f"--json and --output {output} were both given; choose one of them")
    given = sampling.given()
    texts = gather(prompts, file)
    writes = Writer(texts, "json" if json else output or "text")
    from headway.llm import LLM  # imports the engine, which takes a moment

    with spinner(f"loading {config.model.model}"):
        llm = LLM(config=config)
    with closing(llm), held_interrupts() as check:
        adapter = only_adapter(config.model)
        if writes.form == "text" and len(texts) == sampling.n == 1:
            stream(llm, texts[0], chat, given, check, adapter)
        else:
            answer_all(llm, texts, chat, given, writes, check, adapter)
    return 0


def stream(llm: LLM, text: str, chat: bool, given: dict[str, Any], check: Check, adapter: str = "") -> None:
    """One answer as it grows."""

    def on_progress(done: int, num_tokens: int) -> None:
        check()

    if chat:
        pieces = llm.stream_chat([_message(text)], given, on_progress, adapter=adapter)
    else:
        pieces = llm.stream(text, given, on_progress, adapter=adapter)
    # A person gets whole words on lines; a pipe gets the text as it is.
    wrapper = Wrapper(sys.stdout.write, lambda: shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
    is_begun = False
    try:
        with closing(pieces):
            for piece in pieces:
                is_begun = True
                wrapper.feed(piece) if wrapper is not None else sys.stdout.write(piece)
                sys.stdout.flush()
        is_begun = True  # an answer without text is a line too
    finally:
        if wrapper is not None:
            wrapper.flush()
        if is_begun:
            print(flush=True)


def answer_all(
    llm: LLM, texts: Sequence[str], chat: bool, given: dict[str, Any], writes: Writer, check: Check, adapter: str = ""
) -> None:
    """All of them as one batch, written in the order of the prompts, each as soon as those before it are."""
    with progress("generating", len(texts) * int(given.get("n", 1))) as bar:

        def on_progress(done: int, num_tokens: int) -> None:
            bar.update(done, num_tokens)
            check()

        def on_completion(index: int, completion: Completion) -> None:
            writes.add(index, completion, bar)

        try:
            if chat:
                llm.chat([[_message(text)] for text in texts], given, on_progress, on_completion, adapter=adapter)
            else:
                llm.generate(texts, given, on_progress, on_completion, adapter=adapter)
        except KeyboardInterrupt:
            num_written = writes.flush(bar)
            said = f"interrupted; {num_written} of {len(texts)} prompts are answered, and nothing of the others is kept"
            print(f"headway: {said}", file=sys.stderr, flush=True)
            raise


class Writer:
    """Writes completions in the order of their prompts; one that comes early waits for those before it."""

    def __init__(self, texts: Sequence[str], form: str) -> None:
        self.form = form
        self._texts = texts
        self._early: dict[int, Completion] = {}
        self._next = 0
        self._num_written = 0

    def add(self, index: int, completion: Completion, bar: Bar) -> None:
        self._early[index] = completion
        while self._next in self._early:
            self._write(self._next, bar)
            self._next += 1

    def flush(self, bar: Bar) -> int:
        """Write those that wait, though some before them never come; how many prompts have their answers now."""
        for index in sorted(self._early):
            self._write(index, bar)
        return self._num_written

    def _write(self, index: int, bar: Bar) -> None:
        for line in self._lines(index, self._early.pop(index)):
            bar.write(line)
        self._num_written += 1

    def _lines(self, index: int, completion: Completion) -> list[str]:
        if self.form == "json":
            return [jsonlib.dumps(to_json(completion))]
        if self.form == "jsonl":
            return [jsonlib.dumps(line, ensure_ascii=False) for line in to_jsonl(self._texts[index], completion)]
        # A person sees which answer it is; a pipe gets the answers alone.
        if not sys.stdout.isatty():
            return [answer.text for answer in completion.outputs]
        title = f"[{index + 1}/{len(self._texts)}] " if len(self._texts) > 1 else ""
        is_one = len(completion.outputs) == 1
        labels = [title if is_one else f"{title}answer {answer.index + 1}: " for answer in completion.outputs]
        return [f"{label}{answer.text.lstrip()}" for label, answer in zip(labels, completion.outputs, strict=True)]


def gather(prompts: Sequence[str], file: str | None) -> list[str]:
    """The prompts of the command line and of the file; of a pipe if neither is given."""
    is_piped = not prompts and file is None and not sys.stdin.isatty()
    where = "-" if is_piped else file
    texts = [*prompts, *(read_prompts(where) if where else ())]
    if texts:
        return texts
    if where is not None:
        name = "standard input" if where == "-" else where
        raise ConfigError(f"{name} holds no prompt; a prompt is a line with something in it")
    raise ConfigError(
        'no prompt was given; name one (headway generate "Once upon a time"), pipe some in, or use --file FILE'
    )


def read_prompts(file: str) -> list[str]:
    """The prompts of a file, or of standard input (-), one per line."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts from {file}: {error}") from error
    # Not splitlines: it would also break at characters that a prompt may hold, and JSON too.
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not file.endswith(".jsonl"):
        return lines
    return [_from_json(line, f"{file}, prompt {number}") for number, line in enumerate(lines, 1)]


def _from_json(line: str, where: str) -> str:
    try:
        value = jsonlib.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ConfigError(f'{where} is {line[:80]}; allowed: a string, or an object with a string "prompt"')
    return prompt


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def to_jsonl(prompt: str, completion: Completion) -> list[dict[str, Any]]:
    """One object per answer; `prompt` is as it was given, without the chat template."""
    return [
        {
            "prompt": prompt,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "tokens": len(answer.token_ids),
        }
        for answer in completion.outputs
    ]


def to_json(completion: Completion) -> dict[str, Any]:
    """Everything that is known of a prompt and its answers."""
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
