"""Flags that choose a model for a bench or a check: which one, in which number formats, on how many threads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

if TYPE_CHECKING:
    from headway.bench.setup import ModelSetup


@dataclass(frozen=True, slots=True)
class Choices:
    """What every bench of a whole model takes; left out, the engine's own defaults hold."""

    model: str | None = None
    """A bundled name, a .gguf file, or a directory; the bundled model if not given."""
    dtype: str | None = None
    """Number format of the weights: float32, bfloat16, int8, q4 or auto."""
    kv_dtype: str | None = None
    """Number format of keys and values: float32, fp16, int8 or auto."""
    kernels: str | None = None
    """auto, native, native-LEVEL (generic, avx2, avx512, avx512vnni) or ref."""
    threads: int | None = None
    """Compute threads; the number of usable cores if not given."""
    cache_dir: str | None = None
    """Where converted models are kept; ~/.cache/headway if not given."""
    model_family: str | None = None
    """A family of your own, as my.module or my.module:Thing."""

    def setup(self) -> ModelSetup:
        from headway.bench.setup import ModelSetup  # imports the engine, which takes a moment

        return ModelSetup(**asdict(self))


ModelFlags = Annotated[Choices, Parameter(name="*", group=Group("Model", sort_key=2))]
DEFAULTS = Choices()
