"""headway: an LLM serving engine. These four names are the public interface; everything else may change.

Nothing heavy is imported until a name is asked for: `import headway` must stay light for the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.config import EngineConfig
    from headway.errors import EngineError
    from headway.llm import LLM
    from headway.values.params import SamplingParams

__all__ = ["LLM", "EngineConfig", "EngineError", "SamplingParams"]


def __getattr__(name: str) -> object:
    homes = {
        "LLM": "headway.llm",
        "EngineConfig": "headway.config",
        "EngineError": "headway.errors",
        "SamplingParams": "headway.core.request",
        "__version__": "headway.about",
    }
    if name not in homes:
        raise AttributeError(f"module 'headway' has no attribute {name!r}; it exports {', '.join(__all__)}")
    from importlib import import_module  # here, so that a plain `import headway` imports nothing at all

    return getattr(import_module(homes[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
