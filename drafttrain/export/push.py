"""Publishes a bundle on the Hugging Face Hub: its known files and a fresh model card, in one commit.

The files are uploaded first and become visible with the commit, all at once; whatever fails before leaves the
repository's branches as they were.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from drafttrain.bundle_files import (
    CLASSIFIER,
    CONFIG,
    CONTENTS,
    EVALUATION,
    README,
    WEIGHTS,
    read_evaluation,
)
from drafttrain.export.card import model_card, read_facts, read_settings
from drafttrain.self_draft.corpus_cache import DATA as NGRAM_DATA
from drafttrain.self_draft.corpus_cache import FILE as NGRAMS
from drafttrain.self_draft.corpus_cache import CorpusCache
from drafttrain.utils.errors import UserError, brief
from drafttrain.utils.files import new_folder, read_json

MAIN = "main"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"


@dataclass(frozen=True)
class Publication:
    """What is to be published.

    Attributes:
        repo: its Hub id.
        files: bytes, or the file that holds them, by name in the repository.
        warnings: what the user may not want the world to see.
    """

    repo: str
    files: dict[str, Path | bytes]
    warnings: list[str]

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }


def prepare(bundle: str | os.PathLike, repo: str) -> Publication:
    """What a bundle is published as: its known files, the card rendered for that repository, and a config
    that names the target as others find it. Nothing is sent anywhere.

    Raises:
        UserError: no Hub id, no bundle, nothing measured, damaged weights, or no Hub id of the target.
    """
    bundle = Path(bundle)
    _check_repo(repo)
    settings = read_settings(bundle)
    if not (read_evaluation(bundle / EVALUATION) or {}).get("tasks"):
        raise UserError(
            f"{bundle}: no eval.json with results, and what was not measured is not published; name prompts "
            "under evaluate.prompts in its recipe and repeat drafttrain run RECIPE"
        )
    _check_whole(bundle)
    name, base_model = str(settings["target"].get("name")), read_facts(bundle).base_model
    if not _is_hub_id(base_model or name) or (base_model is None and _is_path(name)):
        raise UserError(
            f"{bundle}: its target {base_model or name} is no Hub id (user/name), which the card has "
            "to name; set export.base_model in its recipe and export again"
        )
    files: dict[str, Path | bytes] = {
        name: bundle / name for name in CONTENTS if (bundle / name).is_file() and name != CONFIG
    }
    if base_model and _is_path(name):  # others do not have it there
        settings["target"]["name"] = base_model
    files[CONFIG] = (json.dumps(settings, indent=2) + "\n").encode()
    files[README] = model_card(bundle, repo).encode()
    return Publication(repo, dict(sorted(files.items())), _paths_in(bundle, files))


def _check_whole(bundle: Path) -> None:
    """Raises UserError when a large file is not as long as its header says."""
    classifier = [CLASSIFIER] if (bundle / CLASSIFIER).exists() else []
    for name in (WEIGHTS, *classifier):
        try:
            with safe_open(bundle / name, "np"):  # reads the header, which tells how long the file must be
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(f"{bundle / name}: cannot be read ({error}); export the bundle again") from None
    if any((bundle / name).exists() for name in (NGRAMS, NGRAM_DATA)):
        CorpusCache.open(bundle)


def write_publication(publication: Publication, out: str | os.PathLike) -> None:
    """Writes to a folder what would be uploaded. An earlier dry run for the same repository is replaced.

    Raises:
        UserError: the folder holds something else.
    """
    _check_place(Path(out), publication)
    with new_folder(out) as folder:
        for name, content in publication.files.items():
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())


def _check_place(out: Path, publication: Publication) -> None:
    """Nothing is replaced but a dry run for the same repository, which its card loads the drafter from; least
    of all the bundle that is published."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    card = (out / README).read_text("utf-8", errors="replace") if README in names else ""
    own = {file.parent.resolve() for file in publication.files.values() if isinstance(file, Path)}
    others = names - CONTENTS.keys() - {README}
    if others or out.resolve() in own or f'from_pretrained("{publication.repo}")' not in card:
        raise UserError(
            f"{out}: holds something else than a dry run for {publication.repo}; name another folder with "
            "--out"
        )


def push(publication: Publication, private: bool = False, revision: str = MAIN) -> str:
    """Uploads a publication as one commit, which also deletes files of a bundle that it no longer has.

    Args:
        private: the repository must be private; one that is made for it becomes so.
        revision: branch to commit to; made if it is not there, and removed again if the commit fails.

    Returns:
        the address of the commit.

    Raises:
        UserError: no token, no rights, no network, or the Hub refuses.
    """
    repo = publication.repo
    if get_token() is None:
        raise UserError(f"{repo}: no token for the Hub: {LOG_IN}")
    api = HfApi(library_name="drafttrain")
    with _one_line_errors(repo):
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise UserError(
                f"{repo}: exists and is public; make it private in its settings, choose another name, or "
                "leave out --private"
            )
        with _branch(api, repo, revision):
            there = set(api.list_repo_files(repo, revision=revision))
            gone = sorted(there & CONTENTS.keys() - publication.files.keys())
            operations = [
                *(CommitOperationAdd(name, content) for name, content in publication.files.items()),
                *(CommitOperationDelete(name) for name in gone),
            ]
            return _commit(api, repo, revision, operations)


def _commit(
    api: HfApi, repo: str, revision: str, operations: list[CommitOperationAdd | CommitOperationDelete]
) -> str:
    """Commits; returns the address of the commit. A commit whose answer got lost is found all the same."""
    before = api.model_info(repo, revision=revision).sha
    message = "Upload drafter with drafttrain"
    try:
        return str(api.create_commit(repo, operations, commit_message=message, revision=revision).commit_url)
    except HTTPError as error:
        if getattr(error, "response", None) is not None:  # the Hub has refused
            raise
        with contextlib.suppress(HTTPError, OSError):
            after = api.model_info(repo, revision=revision).sha
            if after != before:
                return f"{constants.ENDPOINT}/{repo}/commit/{after}"
        raise


@contextmanager
def _branch(api: HfApi, repo: str, revision: str) -> Iterator[None]:
    """Makes a branch for the block, unless it is there, as a pull request's always is; removes it again if
    the block fails."""
    made = False
    if revision != MAIN and not revision.startswith("refs/"):
        try:
            api.create_branch(repo, branch=revision)
            made = True
        except HfHubHTTPError as error:
            if error.response.status_code != 409:  # there already
                raise
    try:
        yield
    except BaseException:
        if made:
            with contextlib.suppress(HTTPError, OSError):
                api.delete_branch(repo, branch=revision)
        raise


@contextmanager
def _one_line_errors(repo: str) -> Iterator[None]:
    """Turns what the client raises into one line that never holds the token."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError(f"{repo}: the Hub is switched off by HF_HUB_OFFLINE; unset it and repeat") from None
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{repo}: {_reason(error)}; nothing was published") from None


def _reason(error: BaseException) -> str:
    """What went wrong and how to mend it: by the Hub's answer, wherever it is in the chain of causes, or by
    the first cause of all."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    answered = next((cause for cause in chain if getattr(cause, "response", None) is not None), None)
    detail = brief(str(answered or chain[-1]).replace(get_token() or "\0", "***"))
    if answered is None:
        if any(isinstance(cause, HTTPError | ConnectionError | TimeoutError) for cause in chain):
            return f"the Hub at {constants.ENDPOINT} cannot be reached ({detail}); repeat when it can be"
        return f"the upload failed ({detail})"
    status = answered.response.status_code  # type: ignore[attr-defined]
    if status == 401:
        return f"the Hub does not accept the token: {LOG_IN}"
    if status == 403:
        return "this token has no right to write there: choose a repository of yours, or " + LOG_IN
    if status in (429, 500, 502, 503, 504):
        return f"the Hub answered {status}: repeat the same command later; what it has is not sent again"
    return f"the Hub answered {status} ({detail})"


def _check_repo(repo: str) -> None:
    if not _is_hub_id(repo):
        raise UserError(f"{repo}: no name of a repository; write it as user/name")


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return HUB_ID.fullmatch(name) is not None


def _is_path(name: str) -> bool:
    is_file = name.endswith(".gguf") or Path(name).exists()
    return is_file or name.startswith((".", "/", "~")) or name.count("/") > 1


def _paths_in(bundle: Path, files: dict[str, Path | bytes]) -> list[str]:
    """Says which JSON files name folders of this machine."""
    found = []
    for name, content in files.items():
        if not name.endswith(".json"):
            continue
        value = json.loads(content) if isinstance(content, bytes) else read_json(content)
        found += [f"{name}: {key} is {text}" for key, text in _texts(value) if _names_folder(text)]
    return found


def _names_folder(text: str) -> bool:
    return bool(re.search(r"(?:^|[\s='\"])(?:~|/[\w.-]+)/[\w.-]", text))


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of every text in JSON."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{key}.{name}".lstrip("."))
