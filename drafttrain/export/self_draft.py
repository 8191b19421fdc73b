"""Self-Draft out of files: an n-gram cache, tuned settings, or neither."""

import os
from pathlib import Path

from drafttrain.calibration.self_draft import FILE as SETTINGS
from drafttrain.calibration.self_draft import SelfDraftSettings
from drafttrain.corpus.chat import tokenizer_hash
from drafttrain.errors import UserError
from drafttrain.inference.self_draft import SelfDraft
from drafttrain.ngrams.corpus_cache import FILE as CORPUS
from drafttrain.ngrams.corpus_cache import CorpusCache
from drafttrain.target.frozen import FrozenTarget


def holds_self_draft(folder: str | os.PathLike) -> bool:
    """Whether a folder has a cache or settings in it."""
    return any((Path(folder) / name).is_file() for name in (CORPUS, SETTINGS))


def load_self_draft(target: FrozenTarget, folder: str | os.PathLike | None = None) -> SelfDraft:
    """Self-Draft for a target.

    Args:
        folder: of `build-ngrams`, of `tune-self-draft`, or of both. None: the text at hand alone, with the
            settings that Self-Draft has by itself.

    Raises:
        UserError: there is neither in the folder, it is damaged, or the cache is of another tokenizer.
    """
    if folder is None:
        return SelfDraftSettings().proposer(target, None)
    if not holds_self_draft(folder):
        raise UserError(
            f"{folder}: neither an n-gram cache nor settings of Self-Draft; make them with drafttrain "
            "build-ngrams and tune-self-draft"
        )
    settings = SelfDraftSettings.load(folder) if (Path(folder) / SETTINGS).is_file() else SelfDraftSettings()
    return settings.proposer(target, open_corpus(target, folder))


def open_corpus(target: FrozenTarget, folder: str | os.PathLike) -> CorpusCache | None:
    """The n-gram cache in a folder, if there is one.

    Raises:
        UserError: it is damaged, or of another tokenizer.
    """
    if not (Path(folder) / CORPUS).is_file():
        return None
    return CorpusCache.open(folder, None if target.tokenizer is None else tokenizer_hash(target.tokenizer))
