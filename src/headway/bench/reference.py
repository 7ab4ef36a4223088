"""The same weights in transformers' own model class: what greedy answers and logits are held against.

The one file that imports transformers, which serving a model does not need; `missing` says whether it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError


def missing() -> str:
    """What has to be installed first; nothing if all is there."""
    return " and ".join(name for name in ("torch", "transformers") if find_spec(name) is None)


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its bar and its report of tensors, which is judged here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


class Reference:
    """transformers' class of the same architecture name, in float32, over the tensors of a checkpoint."""

    def __init__(self, config: Mapping[str, object], tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> None:
        import torch
        import transformers

        name = str(config["architectures"][0])  # type: ignore[index]
        kind = getattr(transformers, name, None)
        if kind is None:
            raise ConfigError(f"transformers {transformers.__version__} has no {name}")
        fields = {**config, "eos_token_id": None, "pad_token_id": None, "torch_dtype": "float32"}
        state = {name: torch.as_tensor(value.copy()) for name, value in tensors}
        with torch.random.fork_rng(), _quiet():  # the class fills itself with random numbers first
            # Given as a checkpoint is: some classes keep several of its tensors as one.
            self._model: Any
            self._model, told = kind.from_pretrained(
                None,
                config=kind.config_class(**fields),
                state_dict=state,
                dtype=torch.float32,
                output_loading_info=True,
            )
        wrong = [name for key in ("unexpected_keys", "missing_keys", "mismatched_keys") for name in told.get(key) or ()]
        if {*map(str, wrong)} - {"lm_head.weight"}:
            raise ConfigError(f"transformers' {name} has other tensors: {sorted(map(str, wrong))[:4]}")
        self._model.eval()
        self._model.tie_weights()

    def answer(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], NDArray[np.float32]]:
        """The greedy answer and the logits [max_tokens, vocab] that each of its tokens was chosen by."""
        import torch

        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, min_new_tokens=max_tokens,
                do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        logits: NDArray[np.float32] = torch.cat(out.logits).numpy()
        return out.sequences[0, len(prompt) :].tolist(), logits
