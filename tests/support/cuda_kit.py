"""What the tests of the CUDA backend share: a device to run on, tiny weights, a plan desk over its executor.

Without a CUDA device Triton interprets the kernels on the CPU, which must be said before they are imported: import this
module first. Without Triton the importing tests are skipped; scripts/test installs it where there is one, on Linux.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
pytest.importorskip("triton")
if not torch.cuda.is_available():
    import interpreted  # noqa: F401  # sets the interpreter up

import numpy as np

from headway.kernels.cuda.launch import Launch
from headway.models.params import ModelWeights
from headway.models.registry import parameters
from headway.models.spec import ModelSpec
from headway.runner.cuda.assemble import Sizes, make_executor
from runner_kit import Desk
from tiny_models import random_tensors, tiny_spec

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
LAUNCH = Launch(torch.cuda.get_device_properties(0).multi_processor_count if IS_CUDA else 1, IS_CUDA)


def small_spec(**changes: object) -> ModelSpec:
    """A tiny model whose sizes Triton's vectors can hold."""
    values: dict[str, object] = {"hidden": 48, "head_dim": 16, "intermediate": 40, "layers": 2, "max_len": 256}
    return tiny_spec(**{**values, **changes})


def plain_weights(spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> ModelWeights:
    """The weights of `tiny_models.tiny_decoder`, on the device and unpacked."""
    tensors = random_tensors(spec, seed)
    fused = {
        param.name: torch.from_numpy(np.concatenate([tensors[part.source] for part in param.parts]))
        for param in parameters(spec)
    }
    return ModelWeights({name: tensor.to(DEVICE, dtype) for name, tensor in fused.items()}, "rows")


class CudaDesk(Desk):
    """The desk of the runner's tests over a `CudaExecutor` and a real tiny model."""

    def __init__(
        self,
        spec: ModelSpec | None = None,
        *,
        num_rows: int = 4,
        num_blocks: int = 48,
        host_blocks: int = 0,
        max_tokens: int = 128,
        weights: ModelWeights | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.spec = spec or small_spec()
        self.weights = weights or plain_weights(self.spec)
        sizes = Sizes(num_rows, num_blocks, self.spec.max_len, max_tokens, host_blocks=host_blocks, kv_dtype=kv_dtype)
        self.executor = make_executor(self.spec, self.weights, sizes, LAUNCH)  # type: ignore[assignment]
        self.block_size = sizes.block_size
        self.free = list(range(num_blocks))
        self.next_plan = 0

    def logits(self) -> torch.Tensor:
        """Of the step that ran last, [samples, vocab] and padding."""
        logits = self.executor.graphs.step.decoder.logits  # type: ignore[attr-defined]
        if IS_CUDA:
            torch.cuda.synchronize()
        return logits.float().cpu()
