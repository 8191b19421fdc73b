"""Publish a bundle on the Hugging Face Hub: its known files and a new model card, in one commit.

The files are uploaded first and become visible together with the commit; a failure before it leaves the
repository's branches unchanged.
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
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open

from drafttrain.bundle_files import (
    CLASSIFIER_WEIGHTS,
    CONFIG,
    EVALUATION,
    README,
    WEIGHTS,
    read_evaluation,
)
from drafttrain.export.card import is_hub_id, missing_facts, model_card, read_facts, read_settings
from drafttrain.export.remote import remote_files
from drafttrain.hub import CONTENTS
from drafttrain.self_draft.corpus_cache import DATA as NGRAM_DATA
from drafttrain.self_draft.corpus_cache import FILE as NGRAMS
from drafttrain.self_draft.corpus_cache import CorpusCache
from drafttrain.target_lm.known import is_known
from drafttrain.utils.errors import UserError, brief
from drafttrain.utils.files import read_json, require_file
from drafttrain.utils.folders import new_folder
from drafttrain.utils.manifest import MANIFEST, is_ours, write_manifest

MAIN = "main"
# branch names that `git check-ref-format` accepts
BRANCH = re.compile(r"(?!/|-|\.)(?!.*(?:\.\.|//|/\.|@\{))[^\s\x00-\x1f\x7f~^:?*\[\\]+(?<![/.])(?<!\.lock)")
BY_HAND = {"LICENSE", "NOTICE"}  # nothing here writes them, so that a bundle without them removes none
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"


@dataclass(frozen=True)
class Publication:
    """The files to publish.

    Attributes:
        repo: the repository's Hub id.
        files: bytes, or the file that holds them, by name in the repository.
        warnings: places in the files that name folders of this machine.
    """

    repo: str
    files: dict[str, Path | bytes]
    warnings: list[str]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }


def prepare(bundle: str | os.PathLike, repo: str, revision: str = MAIN) -> Publication:
    """Collect the files of a bundle, its card rendered for that repository, and its config with the target's
    Hub id. Nothing is sent.

    Raises:
        UserError: `repo` is no Hub id or `revision` no branch name; there is no bundle, its weights are
            damaged, or it lacks results, a licence or the target's Hub id.
    """
    bundle = Path(bundle)
    if not is_hub_id(repo):
        raise UserError(f"--repo: must be user/name, got {repo}")
    if not BRANCH.fullmatch(revision):
        raise UserError(f"--revision: must be the name of a Git branch, got {revision!r}")
    settings, facts = read_settings(bundle), read_facts(bundle)
    if not (read_evaluation(bundle / EVALUATION) or {}).get("tasks"):
        raise UserError(
            f"{bundle}: must hold an eval.json with results; name prompts under evaluate.prompts in its "
            "recipe and repeat drafttrain run RECIPE"
        )
    _check_whole(bundle)
    if missing := missing_facts(settings, facts):
        raise UserError(
            f"{bundle}: its card needs {missing}; set what is missing in the recipe and repeat drafttrain "
            "export RECIPE"
        )
    files: dict[str, Path | bytes] = {
        name: bundle / name for name in CONTENTS if (bundle / name).is_file() and name != CONFIG
    }
    if facts.base_model and not is_known(str(settings["target"].get("name"))):  # maybe a path of this machine
        settings["target"]["name"] = facts.base_model
    files[CONFIG] = (json.dumps(settings, indent=2) + "\n").encode()
    files |= remote_files(repo)
    files[README] = model_card(bundle, repo).encode()
    return Publication(repo, dict(sorted(files.items())), _folders_in(files))


def _check_whole(bundle: Path) -> None:
    """Check that each large file has the length that its header gives.

    Raises:
        UserError: one does not.
    """
    classifier = [CLASSIFIER_WEIGHTS] if (bundle / CLASSIFIER_WEIGHTS).exists() else []
    for name in (WEIGHTS, *classifier):
        require_file(bundle / name)
        try:
            with safe_open(bundle / name, "np"):  # reads the header, which gives the length of the file
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(f"{bundle / name}: cannot be read ({error}); export the bundle again") from None
    if any((bundle / name).exists() for name in (NGRAMS, NGRAM_DATA)):
        CorpusCache.open(bundle)


def write_publication(publication: Publication, out: str | os.PathLike) -> None:
    """Write the files that would be uploaded to a folder. An earlier dry run for the same repository is
    replaced.

    Raises:
        UserError: the folder holds something else.
    """
    _check_place(Path(out), publication)
    with new_folder(out) as folder:
        for name, content in publication.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        write_manifest(folder)


def _check_place(out: Path, publication: Publication) -> None:
    """Refuse to replace anything but an unchanged dry run for the same repository, which its card names; in
    particular, never replace the bundle itself."""
    if out.exists() and out.samefile(Path.cwd()):
        raise UserError(f"{out}: must be a folder of its own, got the working directory; name another")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    is_listed = (out / MANIFEST).exists()  # then a file with one of our names may be the user's
    unchanged = out.is_dir() and is_ours(out, () if is_listed else {*CONTENTS, README})
    card = (
        (out / README).read_text("utf-8", errors="replace") if unchanged and (out / README).exists() else ""
    )
    own = {file.parent.resolve() for file in publication.files.values() if isinstance(file, Path)}
    if out.resolve() in own or f'from_pretrained("{publication.repo}")' not in card:
        raise UserError(
            f"{out}: holds something else than a dry run for {publication.repo}; name another folder with "
            "--out"
        )


def push(publication: Publication, private: bool = False, revision: str = MAIN) -> str:
    """Upload a publication as one commit, which also deletes files of an earlier bundle that this one lacks.

    Args:
        private: create the repository as private; refuse one that is public.
        revision: branch to commit to; created if it does not exist, and removed again if the commit fails.

    Returns:
        the commit's URL.

    Raises:
        UserError: no token, no rights, no network, or the Hub refuses.
    """
    repo = publication.repo
    if get_token() is None:
        raise UserError(f"{repo}: no token for the Hub; {LOG_IN}")
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
            gone = sorted(there & CONTENTS.keys() - publication.files.keys() - BY_HAND)
            operations = [
                *(CommitOperationAdd(name, content) for name, content in publication.files.items()),
                *(CommitOperationDelete(name) for name in gone),
            ]
            return _commit(api, repo, revision, operations)


def _commit(
    api: HfApi, repo: str, revision: str, operations: list[CommitOperationAdd | CommitOperationDelete]
) -> str:
    """Commit and return the commit's URL, also where the connection is lost after the Hub has committed."""
    before = api.model_info(repo, revision=revision).sha
    message = "Upload drafter with drafttrain"
    try:
        return str(api.create_commit(repo, operations, commit_message=message, revision=revision).commit_url)
    except HTTPError as error:
        if getattr(error, "response", None) is not None:  # the Hub refused
            raise
        with contextlib.suppress(HTTPError, OSError):
            after = api.model_info(repo, revision=revision).sha
            if after != before:
                return f"{constants.ENDPOINT}/{repo}/commit/{after}"
        raise


@contextmanager
def _branch(api: HfApi, repo: str, revision: str) -> Iterator[None]:
    """Create a branch for the block, unless it exists, as a pull request's always does; remove it again if
    the block fails."""
    made = False
    if revision != MAIN and not revision.startswith("refs/"):
        try:
            api.create_branch(repo, branch=revision)
            made = True
        except HfHubHTTPError as error:
            if error.response.status_code != 409:  # it exists
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
    """Turn the client's exceptions into one line that never holds the token."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError(f"{repo}: the Hub is switched off by HF_HUB_OFFLINE; unset it and repeat") from None
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{repo}: {_reason(error)}; nothing was published") from None


def _reason(error: BaseException) -> str:
    """Return the cause and a remedy: from the Hub's answer, wherever it is in the chain of causes, else from
    the first cause."""
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


def _folders_in(files: dict[str, Path | bytes]) -> list[str]:
    """Return the places in JSON files that name folders of this machine."""
    places = []
    for name, content in files.items():
        if not name.endswith(".json"):
            continue
        value = json.loads(content) if isinstance(content, bytes) else read_json(content)
        places += [f"{name}: {key} is {text}" for key, text in _texts(value) if _names_folder(text)]
    return places


def _names_folder(text: str) -> bool:
    return bool(re.search(r"file://|(?<![\w.:/-])(?:~|/[\w.-]+)/[\w.-]", text))


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every text in JSON."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{key}.{name}".lstrip("."))
