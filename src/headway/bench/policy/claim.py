"""A claim: a number that was measured, and what it has to be."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """`least` and `most` bound the value; a claim without either is printed and holds."""

    case: str
    what: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool:
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)

    @property
    def bar(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}" if self.most is not None else ""

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "holds": self.holds}
