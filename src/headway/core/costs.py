"""What the core may ask about the cost of a step. What it costs is learned elsewhere."""

from __future__ import annotations

from headway.values.work import Work


class Costs:
    """Seconds, as far as somebody knows; here nobody does. Whoever learns them overrides everything."""

    is_ready: bool = False
    mean_decode: float = 1.0  # rows that decode together

    def observe(self, work: Work, seconds: float) -> None:
        """A step with this work took so long."""

    def step(self, work: Work) -> float:
        """A step with this work."""
        return 0.0

    def prefill(self, count: int, start: int = 0) -> float:
        """What `count` prompt tokens add to steps, `start` cells being present."""
        return 0.0

    def decode(self, num_prompt: int, num_output: float) -> float:
        """The engine's time for so many output tokens, among as many rows as usual."""
        return 0.0

    def copy(self, num_blocks: int) -> float:
        """What moving so many blocks adds to a step."""
        return 0.0
