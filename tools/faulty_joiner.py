"""An engine that joins fronts, in which marked requests fail: for `tools/chaos_joined.py` only.

HEADWAY_TEST_FAULTS=1 python tools/faulty_joiner.py '{"model": "…", "join": "127.0.0.1:7500", "name": "a"}'
"""

from __future__ import annotations

import json
import os
import sys

from faulty_server import VARIABLE, patch_engine
from headway import logs
from headway.cli.engine_child import build_own, end
from headway.cluster.join import JoinConfig, run_joined
from headway.config import EngineConfig


def main() -> int:
    assert os.environ.get(VARIABLE) == "1", f"this is for tests: {VARIABLE} is not 1"
    orders = json.loads(sys.argv[1])
    join = JoinConfig(join=orders.pop("join"), name=orders.pop("name"))
    logs.set_up("engine", "info", "text")
    patch_engine()
    config, kept = EngineConfig.of(**orders), list[object]()
    return run_joined(join, lambda: build_own(config, kept, False))


if __name__ == "__main__":
    end(main())
