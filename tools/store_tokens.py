"""Stores greedy answers of transformers on the bundled model, for the test of the wheels, which has no transformers.

    .venv/bin/python tools/store_tokens.py     # writes tests/install/tokens.json

Prompts are every third of tools/data/prompts.txt, as they are, and one question in the model's chat template.
"""

from __future__ import annotations

import json
from pathlib import Path

import transformers

from exactness import read_prompts
from headway.bench.reference import Reference
from headway.config import EngineConfig
from headway.modelfile.source import ModelSource, open_model
from headway.text.chat import ChatTemplate
from headway.text.tokenizer import Tokenizer

TARGET = Path(__file__).resolve().parents[1] / "tests/install/tokens.json"
NUM_TOKENS = 24
QUESTION = "What is the capital of France?"


def question_tokens(source: ModelSource, tokenizer: Tokenizer) -> list[int]:
    with ChatTemplate(source.chat_template, source.bos_token, source.eos_token) as template:
        text = template.render([{"role": "user", "content": QUESTION}])
    return tokenizer.encode(text, add_special=False)


def main() -> None:
    source = open_model(EngineConfig().model)
    tokenizer = Tokenizer.open(source.tokenizer_path())
    model = Reference(source.config, source.tensors())
    prompts = []
    for text in read_prompts()[::3]:
        answer, _ = model.answer(tokenizer.encode(text), NUM_TOKENS)
        prompts.append({"prompt": text, "tokens": answer, "text": tokenizer.decode(answer)})
    answer, _ = model.answer(question_tokens(source, tokenizer), 2 * NUM_TOKENS)
    ends = [place for place, token in enumerate(answer) if token in source.eos_ids]
    tokens = answer[: ends[0]] if ends else answer
    record = {
        "model_sha256": source.digest,
        "transformers": transformers.__version__,
        "prompts": prompts,
        "chat": {"prompt": QUESTION, "tokens": tokens, "text": tokenizer.decode(tokens), "ends": bool(ends)},
    }
    TARGET.write_text(json.dumps(record).replace('{"prompt"', '\n{"prompt"') + "\n", encoding="utf-8")
    print(f"{TARGET}: {len(prompts)} prompts of {NUM_TOKENS} tokens, and a question answered by {record['chat']}")


if __name__ == "__main__":
    main()
