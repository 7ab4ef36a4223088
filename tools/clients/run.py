"""Runs other projects' clients, unchanged, against a headway server of their own and prints a table of what they did.

    tools/clients/run                       # every client; the first time installs about 6 GB, most of it torch
    tools/clients/run --only openai,llm     # some of them
    tools/clients/run --latest              # their newest versions instead of those the table in docs/clients.md has

Every client has an environment of its own under build/clients (--envs), made from the package registries by pip or npm.
Its script (with_*.py, with_*.mjs) checks texts, finish reasons, counts and numbers of completed requests. Beyond that:
greedy answers to the same question must be the same whichever client asks, the server must answer no request of a
client with an error but the one that asks for it, and must ignore no field. Exits 1 if a client fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headway.config import ModelConfig
from headway.modelfile.source import open_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT_LIMIT_S = 900
INSTALL_LIMIT_S = 3600
NODE = "node@22.23.3"  # the interpreter too: newer openai does not run on every node that a machine has
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# The dependencies of vllm that `vllm bench serve` imports, in vllm's own words. The others are for its engine, most of
# them for CUDA: several gigabytes.
VLLM_NEEDS = (
    "transformers>=5.16.1,<5.20.0",
    "fastapi[standard]>=0.133.0,<0.137.0",
    "xgrammar==0.2.8",
    "llguidance>=1.7.0,<1.8.0",
    "oss-harmony>=0.0.11",
    *("aiohttp", "cachetools", "cbor2", "cloudpickle", "einops", "msgspec", "numpy", "openai", "partial-json-parser"),
    *("pillow", "prometheus_client", "psutil", "py-cpuinfo", "pybase64", "pydantic", "pyzmq", "regex", "requests"),
    *("tqdm", "watchfiles"),
)


@dataclass(frozen=True)
class Client:
    """A client, what is installed for it, and the statuses it provokes on purpose."""

    key: str
    title: str
    script: str
    packages: tuple[str, ...]  # pinned, the client itself first
    bare: tuple[str, ...] = ()  # installed without their dependencies
    provoked: frozenset[int] = frozenset()


CLIENTS = (
    Client("openai", "openai (Python)", "with_openai.py", ("openai==3.49.0",), provoked=frozenset({404})),
    Client("openai-node", "openai (node)", "with_openai.mjs", ("openai@7.53.0", NODE), provoked=frozenset({404})),
    Client("litellm", "litellm", "with_litellm.py", ("litellm==1.106.2",)),
    Client("langchain", "langchain-openai", "with_langchain.py", ("langchain-openai==1.7.3",)),
    Client("instructor", "instructor", "with_instructor.py", ("instructor==1.17.0",)),
    Client("llm", "llm command", "with_llm.py", ("llm==0.36",)),
    Client("llama-index", "llama-index", "with_llama_index.py", ("llama-index-llms-openai-like==0.8.1",)),
    Client("haystack", "haystack", "with_haystack.py", ("haystack-ai==3.4.0",)),
    Client("guidellm", "guidellm", "with_guidellm.py", ("guidellm==0.8.1", TORCH)),
    Client("vllm", "vllm bench serve", "with_vllm.py", (TORCH, *VLLM_NEEDS), bare=("vllm==0.32.0",)),
)


@dataclass
class Outcome:
    """What came of one client."""

    version: str = "?"
    ran: list[str] = field(default_factory=list)
    answers: list[tuple[str, str, str]] = field(default_factory=list)  # what ran, what was asked, the greedy answer
    num_requests: int = 0
    faults: list[str] = field(default_factory=list)


def main() -> int:
    args = _arguments()
    wanted = args.only.split(",") if args.only else [client.key for client in CLIENTS]
    unknown = set(wanted) - {client.key for client in CLIENTS}
    if unknown:
        allowed = ", ".join(client.key for client in CLIENTS)
        print(f"there is no client {', '.join(sorted(unknown))}; allowed: {allowed}", file=sys.stderr)
        return 2
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, model = _write_tokenizer(Path(folder) / "tokenizer")
        for client in CLIENTS:
            if client.key in wanted:
                scratch = Path(folder) / client.key
                scratch.mkdir()
                outcomes[client.title] = _try(client, args, model, tokenizer, scratch)
    _compare(outcomes)
    print("| client | version | what ran | requests | result |\n|---|---|---|---|---|")
    for title, outcome in outcomes.items():
        result = "; ".join(outcome.faults) or "works"
        print(f"| {title} | {outcome.version} | {'; '.join(outcome.ran)} | {outcome.num_requests} | {result} |")
    return 1 if any(outcome.faults for outcome in outcomes.values()) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="clients, with commas: " + ", ".join(client.key for client in CLIENTS))
    parser.add_argument("--latest", action="store_true", help="the newest versions, installed anew")
    parser.add_argument("--envs", type=Path, default=ROOT / "build" / "clients", help="where environments are kept")
    return parser.parse_args()


def _try(client: Client, args: argparse.Namespace, model: str, tokenizer: Path, scratch: Path) -> Outcome:
    outcome = Outcome()
    print(f"{client.title}: installing", file=sys.stderr)
    try:
        env = _install(client, args.envs / client.key, args.latest)
        log = scratch / "server.log"
        with _server(log) as url:
            print(f"{client.title}: running", file=sys.stderr)
            _run_script(client, env, [url, model, str(tokenizer), str(scratch)], outcome)
        _read_log(client, log, outcome)
    except (subprocess.SubprocessError, OSError, RuntimeError) as error:
        outcome.faults.append(_short(str(error)))
    return outcome


def _install(client: Client, env: Path, is_latest: bool) -> Path:
    """The client's environment: made once, or again if what it should hold has changed."""
    packages = [*client.packages, *(f"bare {each}" for each in client.bare)]
    if is_latest:
        # What vllm needs goes with its version, and so does not move by itself. By a tag npm takes no older version.
        kept = (TORCH, NODE, *VLLM_NEEDS)
        packages = [each if each in kept else re.sub("@.*", "@latest", each.split("==")[0]) for each in packages]
    stamp, wanted = env / "installed", "\n".join(packages)
    if not is_latest and stamp.is_file() and stamp.read_text() == wanted:
        return env
    shutil.rmtree(env, ignore_errors=True)
    env.mkdir(parents=True)
    if client.script.endswith(".mjs"):
        _call(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(env), *packages])
    else:
        _call([sys.executable, "-m", "venv", str(env)])
        plain = [each for each in packages if not each.startswith("bare ")]
        _pip(env, plain)
        if client.bare:
            _pip(env, ["--no-deps", *(each.removeprefix("bare ") for each in packages if each.startswith("bare "))])
    stamp.write_text(wanted)
    return env


def _pip(env: Path, packages: Sequence[str]) -> None:
    install = [str(env / "bin" / "pip"), "--disable-pip-version-check", "install", "-qq"]
    try:
        _call([*install, *packages])
    except RuntimeError:
        if TORCH not in packages:
            raise
        # A build of torch for the CPU may be in torch's own index alone.
        _call([*install, "--extra-index-url", TORCH_INDEX, *packages])


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} exited with {done.returncode}: {done.stderr[-1000:]}")


@contextmanager
def _server(log: Path) -> Iterator[str]:
    """The URL of a server of its own, whose log goes to a file."""
    command = [sys.executable, "-m", "headway.cli.main", "serve", "--port", "0", "--log-format", "json"]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            found = next((url for line in process.stdout if (url := re.search(r"http://\S+", line))), None)
            if found is None:
                raise RuntimeError(f"the server did not start: {log.read_text()[-1000:]}")
            yield found.group()
        finally:
            process.terminate()


def _run_script(client: Client, env: Path, arguments: Sequence[str], outcome: Outcome) -> None:
    if client.script.endswith(".mjs"):
        # Beside node_modules, where imports are looked for.
        script = Path(shutil.copy(HERE / client.script, env))
        command = [str(env / "node_modules" / ".bin" / "node"), str(script), *arguments]
    else:
        command = [str(env / "bin" / "python"), str(HERE / client.script), *arguments]
    done = subprocess.run(
        command, env=_environment(arguments[-1]), capture_output=True, text=True, timeout=SCRIPT_LIMIT_S, check=False
    )
    for line in done.stdout.splitlines():
        if not line.startswith("{"):
            continue
        said = json.loads(line)
        if "version" in said:
            outcome.version = said["version"]
        else:
            outcome.ran.append(said["ran"])
            if said.get("text"):
                outcome.answers.append((said["ran"], said["asked"], said["text"]))
    if done.returncode:
        outcome.faults.append(_short(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "it failed"))
    elif not outcome.ran:
        outcome.faults.append("nothing ran")


def _environment(home: str) -> dict[str, str]:
    """The variables of a script: an empty home, no key, no network beyond this machine."""
    dropped = ("PYTHONPATH", "OPENAI_API_KEY", "OPENAI_BASE_URL", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "VLLM_NO_USAGE_STATS": "1"}
    return kept | offline | {"HOME": home, "NO_PROXY": "127.0.0.1,localhost"}


def _read_log(client: Client, log: Path, outcome: Outcome) -> None:
    """What the server says about the client's requests."""
    for line in log.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "status" in entry:
            outcome.num_requests += entry["method"] == "POST"
            if entry["status"] >= 400 and entry["status"] not in client.provoked:
                outcome.faults.append(f"{entry['method']} {entry['path']} got {entry['status']}")
        elif "is ignored" in entry.get("message", ""):
            outcome.faults.append(entry["message"])


def _compare(outcomes: dict[str, Outcome]) -> None:
    """Every client gets the same greedy answer to the same prompt."""
    first: dict[str, str] = {}
    for outcome in outcomes.values():
        for what, asked, text in outcome.answers:
            if first.setdefault(asked, text) != text:
                outcome.faults.append(f"{what} says {text!r}, others {first[asked]!r}")


def _write_tokenizer(folder: Path) -> tuple[Path, str]:
    """The served model's tokenizer as transformers reads it, and the model's name. Clients that count tokens use it."""
    source = open_model(ModelConfig())
    folder.mkdir()
    shutil.copy(source.tokenizer_path(), folder / "tokenizer.json")
    names = {"bos_token": source.bos_token, "eos_token": source.eos_token, "chat_template": source.chat_template}
    length = {"model_max_length": source.config["max_position_embeddings"]}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**kind, **names, **length}))
    (folder / "config.json").write_text(json.dumps(dict(source.config)))
    return folder, source.name


def _short(text: str) -> str:
    return " ".join(text.split())[:300].replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
