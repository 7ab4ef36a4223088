"""`headway verify`: whether a model is computed right here. Owns the flags; the work is in `headway.bench.verify`."""

from __future__ import annotations

from dataclasses import replace

from headway.cli.args import Switch
from headway.cli.model_choice import DEFAULTS, ModelFlags

EXAMPLES = """Examples:
  headway verify
  headway verify my-model.gguf --dtype q4
  headway verify ./my-model --against none --prompts 16 --tokens 64
  headway verify ./my-model --json | tail -1"""


def verify(
    model: str | None = None,
    /,
    *,
    against: str | None = None,
    prompts: int = 6,
    tokens: int = 16,
    json: Switch = False,
    choices: ModelFlags = DEFAULTS,
) -> int:
    """Check a model: tokens and logits against transformers, and every logit bit between ways of running it.

    Against transformers the weights are float32; headway is compared with itself in the format that is served: each
    prompt alone, in company, with chunked prefill, with a cached prefix and after forced preemptions. The exit status
    is 1 if a token or a bit differs, or a logit by more than 1e-4 of the largest, and 2 if the model cannot be run.

    Parameters
    ----------
    model
        A bundled name, a .gguf file, or a directory; the bundled model if not given.
    against
        transformers, or none to leave that comparison out. If not given, transformers is compared where it is
        installed, and named as not run elsewhere.
    prompts
        How many; each has 33 to 96 tokens.
    tokens
        Of each answer.
    json
        End with one line of JSON that holds every row.
    """
    from headway.bench.verify import run  # loads the model's libraries, which takes a second

    chosen = choices if model is None else replace(choices, model=model)
    return run(chosen.setup(), against=against, prompts=prompts, tokens=tokens, as_json=json)
