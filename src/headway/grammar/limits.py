"""What one grammar may cost: the process that checks grammars and the engine compile by the same bounds."""

from __future__ import annotations

from collections.abc import Mapping

CHECK_S = 2.0  # to compile it and to find out how it may begin
MEMORY_BYTES = 2 << 30  # address space of the process that checks; llguidance and a vocabulary take a quarter of it
GRAMMAR_BYTES = 16 << 20  # of one that is compiled; an engine keeps 64, and those of its requests

SLOW_MASK_S = 0.01  # of processor time: beyond what the bounds below let a mask take
MOST_SLOW = 3  # such masks in a row, over all answers by a grammar; then it is too complex

PARSER: Mapping[str, int | bool] = {
    "max_items_in_row": 2000,  # about 500 optional fields of an object
    "initial_lexer_fuel": 1_000_000,  # about 20 ms to build
    "step_lexer_fuel": 100_000,  # about 7 ms for a step
    "step_max_items": 50_000,  # about 2.5 ms for a step
    "max_lexer_states": 20_000,  # of 1 to 2 kB
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Bounds of llguidance's parser; what exceeds them in the middle of an answer ends that answer with an error."""
