"""Refuses torch in every Python process of an environment and writes down which processes there were.

`HOOK` is the text of a `sitecustomize.py`, which each interpreter imports first, whatever its command line is.
"""

from __future__ import annotations

from pathlib import Path

HOOK = """
import atexit, os, sys
LOG = {log!r}

def note(what):
    with open(LOG, "a") as file:
        file.write(f"{{what}} {{os.getpid()}} {{' '.join(sys.orig_argv)}}\\n")

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            note("asks")
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
note("starts")
atexit.register(lambda: note("has" if "torch" in sys.modules else "ends"))
"""


def install(site: Path, log: Path) -> None:
    """Put the hook into a folder that interpreters import from."""
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(HOOK.format(log=str(log)))


def noted(log: Path, what: str) -> list[str]:
    """Lines of one kind: `starts`, `asks` for torch, `ends` without it or `has` it at the end."""
    return [line for line in log.read_text().splitlines() if line.startswith(what)]
