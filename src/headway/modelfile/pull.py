"""Fetching models: by name from a Hugging Face hub, or one .gguf file by URL. What was cut off is resumed.

    root/hub/<owner>--<name>/       a directory as `resolve` takes it
    root/hub/<file>.gguf            a file that was fetched by its URL

Every file whose sha256 is known is checked against it; one that differs is removed.
"""

from __future__ import annotations

import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import BadStatusLine, HTTPException, InvalidURL
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headway.errors import ConfigError
from headway.modelfile.cache import HUB, ModelCache, file_digest

WANTED = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "chat_template*"),
    *("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt"),
    *("modules.json", "sentence_bert_config.json", "*_Pooling/config.json"),
)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_PIECE = 1 << 20
_MAGIC = b"GGUF"
Progress = Callable[[int, int], None]
"""Called with the bytes that are here and the bytes in all, 0 if the server does not say."""


def pulled(name: str, cache: ModelCache) -> Path | None:
    """Where a model of a hub is, if it was fetched."""
    path = cache.root / HUB / name.replace("/", "--")
    return path if _NAME.fullmatch(name) and path.is_dir() else None


def pull(
    name: str,
    cache: ModelCache,
    *,
    revision: str | None = None,
    endpoint: str | None = None,
    sha256: str | None = None,
    progress: Progress = lambda here, total: None,
) -> Path:
    """Fetch `owner/name` of a hub, or the .gguf file at a URL; what is here already is not fetched again."""
    if name.startswith(("http://", "https://")):
        return _pull_file(name, cache.root / HUB, sha256, progress)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"cannot fetch {name!r}; allowed: owner/name of a hub, or the URL of a .gguf file")
    return _pull_hub(name, cache.root / HUB / name.replace("/", "--"), revision, endpoint)


def _pull_hub(name: str, target: Path, revision: str | None, endpoint: str | None) -> Path:
    from huggingface_hub import HfApi  # slow to import, and of no use without a network

    api = HfApi(endpoint=endpoint)
    try:
        info = api.model_info(name, revision=revision, files_metadata=True)
        api.snapshot_download(name, revision=info.sha, local_dir=target, allow_patterns=list(WANTED))
    except Exception as error:  # the errors of its HTTP library have no base that this file could name
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        said = f"cannot fetch {name} from {api.endpoint}: {reason}; --endpoint or HF_ENDPOINT names another hub, and"
        raise ConfigError(f"{said} the same command resumes it") from error
    for sibling in info.siblings or ():
        path = target / sibling.rfilename
        if sibling.lfs is not None and path.is_file():
            _check(path, sibling.lfs.sha256, name)
    if not (target / "config.json").is_file():
        shutil.rmtree(target, ignore_errors=True)
        raise ConfigError(f"{name} has no config.json; a .gguf file in it can be fetched by its URL")
    return target


def _pull_file(url: str, home: Path, sha256: str | None, progress: Progress) -> Path:
    target = home / Path(unquote(urlsplit(url).path)).name
    if target.suffix.lower() != ".gguf":
        raise ConfigError(f"cannot fetch {url}: it is not the URL of a .gguf file")
    if not target.is_file():
        home.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        try:
            _download(url, part, progress)
        except (OSError, HTTPException) as error:
            again = "; the same command resumes it" if _is_cut_off(error) else ""
            raise ConfigError(f"cannot fetch {url}: {str(error).strip()}{again}") from error
        _check_magic(part, url)
        if sha256 is not None:
            _check(part, sha256, url)
        part.rename(target)
    elif sha256 is not None:
        _check(target, sha256, url)
    return target


def _download(url: str, part: Path, progress: Progress) -> None:
    """Append what is missing of a file; all of it, where the server does not give parts."""
    here = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={here}-"} if here else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and here:  # there is nothing after what is here
            return
        raise
    with response, part.open("ab" if response.status == 206 else "wb") as file:
        total = int(response.headers.get("Content-Length") or 0) + file.tell()
        while piece := response.read(_PIECE):
            file.write(piece)
            progress(file.tell(), total)
        if total and file.tell() < total:
            raise OSError(f"the connection ended after {file.tell()} of {total} bytes")


def _is_cut_off(error: Exception) -> bool:
    """False for a refusal, for what cannot be asked, and for an answer that is not HTTP."""
    if isinstance(error, OSError):
        return not isinstance(error, urllib.error.HTTPError)
    return not isinstance(error, (InvalidURL, BadStatusLine))


def _check_magic(part: Path, url: str) -> None:
    """A page to log in, or one that shows the file, is not kept: what is fetched next would be added to it."""
    with part.open("rb") as file:
        start = file.read(len(_MAGIC))
    if start != _MAGIC:
        part.unlink()
        raise ConfigError(
            f"cannot fetch {url}: what is there starts with {start!r}, not {_MAGIC!r}; "
            "a page of a hub names the file's own URL (…/resolve/… for …/blob/…)"
        )


def _check(path: Path, sha256: str, name: str) -> None:
    found = file_digest(path)
    if found != sha256.lower():
        path.unlink()
        raise ConfigError(
            f"{path.name} of {name} has the sha256 {found}, not {sha256}: it was damaged on its way and is removed; "
            "fetch it again"
        )
