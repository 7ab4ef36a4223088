"""The rotary tables of a model: one for layers that see every token, one for those that see a window."""

from __future__ import annotations

from headway.layers.rope import RopeTable, rope_table
from headway.models.spec import ModelSpec


def rope_tables(spec: ModelSpec) -> tuple[RopeTable, RopeTable]:
    """That of layers without a window and that of layers with one: often the same."""
    usual = rope_table(spec.rope_size, spec.max_len, spec.rope_theta, spec.rope_scaling)
    if not spec.window_rope_theta:
        return usual, usual
    return usual, rope_table(spec.rope_size, spec.max_len, spec.window_rope_theta, None)
