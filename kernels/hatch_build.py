"""The wheel's build hook: compiles the library outside the source tree and puts it into the wheel."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build_library import DIGEST, LIBRARY, build, find_compiler, wheel_platform


class CompiledLibrary(BuildHookInterface[Any]):
    """Every wheel holds a library compiled from the sources beside this file, never one that lay around."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the library; the wheel is for this platform and for any Python 3."""
        compiler = find_compiler()
        if compiler is None:
            raise RuntimeError("headway-llm-kernels needs a C++ compiler: install g++ or clang++, or name one in CXX")
        tag = wheel_platform(sysconfig.get_platform(), platform.machine())
        if sys.platform == "darwin":  # the library must run on what its tag promises, not on this system alone
            os.environ["MACOSX_DEPLOYMENT_TARGET"] = ".".join(tag.split("_")[1:3])
        self._folder = tempfile.TemporaryDirectory()
        built = build(Path(self.root), Path(self._folder.name), compiler)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
        build_data["force_include"][str(built)] = f"headway_kernels/{LIBRARY}"
        build_data["force_include"][str(built.with_name(DIGEST))] = f"headway_kernels/{DIGEST}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Drops the compiled files once the wheel holds them."""
        self._folder.cleanup()
