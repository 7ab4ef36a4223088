"""How a family of models writes a call of a tool: by literals around its name and its arguments.

    <tool_call>⏎{"name": "weather", "arguments": {"city": "Paris"}}⏎</tool_call>
    └─ opening ┘└── head ──┘       └── middle ──┘└─ arguments ────┘└─── end ───┘

A grammar makes an answer follow the literals exactly, and the reader of calls finds them again. Which family a chat
template is for is told by the literals it writes itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallFormat:
    """What stands around a call; `between` is what separates two calls, None: an answer has one at most."""

    opening: str  # empty: the head opens a call, at the beginning of an answer alone
    head: str
    middle: str
    end: str
    between: str | None

    @property
    def marks(self) -> tuple[str, ...]:
        """What of the literals may be a token of its own."""
        return tuple(re.findall(r"<[^<>]+>", self.opening + self.end))

    def written(self, name: str, arguments: str) -> str:
        """A call as an answer has it."""
        return f"{self.opening}{self.head}{name}{self.middle}{arguments}{self.end}"


TAGGED = CallFormat("<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")
"""Of Hermes, Qwen 2.5 and 3, SmolLM3; and of models whose template knows no tools."""

BARE_JSON = CallFormat("", '{"name": "', '", "parameters": ', "}", None)
"""Of Llama 3."""


def format_of(template: str) -> CallFormat | None:
    """In which of these forms a chat template has its model write calls; None: in no form that is known here."""
    plain = template.replace("\\", "")  # quotes within Jinja's strings
    if TAGGED.opening in plain and '"arguments"' in plain and "<function=" not in plain:
        return TAGGED
    return BARE_JSON if '{"name"' in plain and '"parameters"' in plain else None
