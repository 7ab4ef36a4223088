"""The `llm` command: a model of extra-openai-models.yaml for chat and one for text, and an endpoint by its URL."""

from __future__ import annotations

import json

from report import BEGINNING, QUESTION, check_answer, command, passed, require, say_version, target

MODELS = """\
- model_id: headway
  model_name: {model}
  api_base: {base_url}
- model_id: headway-text
  model_name: {model}
  api_base: {base_url}
  completion: true
"""


def main() -> None:
    server = target()
    say_version("llm")
    (server.scratch / "extra-openai-models.yaml").write_text(
        MODELS.format(model=server.model, base_url=server.base_url)
    )
    user_path = {"LLM_USER_PATH": str(server.scratch)}
    greedy = ["-o", "temperature", "0", "-o", "max_tokens"]
    for what, flags in (("chat, streamed", []), ("chat", ["--no-stream"])):
        text = command(["llm", "-m", "headway", *greedy, "32", *flags, QUESTION], **user_path)
        (logged,) = json.loads(command(["llm", "logs", "list", "-n", "1", "--json"], **user_path))
        said = logged["response_json"]
        finish = said["finish_reason"] if flags == [] else said["choices"][0]["finish_reason"]
        num_prompt, num_output = logged["input_tokens"], logged["output_tokens"]
        require(logged["response"] == text.strip(), f"{what}: printed {text!r}, logged {logged['response']!r}")
        check_answer(what, QUESTION, text, finish, (num_prompt, num_output, num_prompt + num_output))
    for what, flags in (("completions, streamed", []), ("completions", ["--no-stream"])):
        text = command(["llm", "-m", "headway-text", *greedy, "8", *flags, BEGINNING], **user_path)
        require("Paris" in text, f"{what}: the text is {text!r}")
        passed(what, BEGINNING, text)  # the command keeps neither usage nor finish reason of text completions
    found = command(["llm", "openai", "endpoint", server.base_url, "--models"], **user_path)
    require(found.split() == [server.model], f"--models prints {found!r}")
    text = command(
        ["llm", "openai", "endpoint", server.base_url, "-m", server.model, *greedy, "32", QUESTION], **user_path
    )
    require("Paris" in text, f"endpoint: the text is {text!r}")
    passed("llm openai endpoint", QUESTION, text)


if __name__ == "__main__":
    main()
