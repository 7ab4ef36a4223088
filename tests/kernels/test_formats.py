"""What `auto` means for number formats."""

from __future__ import annotations

import pytest

from headway.config import DTYPES, KV_DTYPES, EngineConfig
from headway.errors import ConfigError
from headway.kernels.formats import resolve_dtype, resolve_kv_dtype


@pytest.mark.parametrize("level", ["none", "generic", "avx2", "avx512", "avx512vnni"])
def test_what_is_asked_for_is_taken(level: str) -> None:
    assert [resolve_dtype(name, level) for name in DTYPES[1:]] == list(DTYPES[1:])
    assert [resolve_kv_dtype(name, "int8") for name in KV_DTYPES[1:]] == list(KV_DTYPES[1:])


def test_auto_is_int8_where_integer_products_are_fast() -> None:
    levels = ("none", "generic", "avx2", "avx512", "avx512vnni")
    assert [resolve_dtype("auto", level) for level in levels] == ["float32", "float32", "int8", "int8", "int8"]


def test_kv_cells_follow_the_weights() -> None:
    chosen = {dtype: resolve_kv_dtype("auto", dtype) for dtype in ("float32", "bfloat16", "int8", "q4")}
    assert chosen == {"float32": "float32", "bfloat16": "float32", "int8": "fp16", "q4": "fp16"}


def test_the_config_names_what_it_takes() -> None:
    with pytest.raises(ConfigError, match="kv_dtype is 'int4'; allowed: auto, float32, fp16, int8"):
        EngineConfig.of(kv_dtype="int4")
    assert EngineConfig.of(block_size=8192).cache.block_size == 8192
    with pytest.raises(ConfigError, match="block_size is 8193; allowed: 1 to 8192"):
        EngineConfig.of(block_size=8193)
