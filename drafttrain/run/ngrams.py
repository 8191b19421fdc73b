"""The n-grams stage: a cache without texts of measured prompts, and Self-Draft tuned for it."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from drafttrain.data.build import unmeasured_conversations
from drafttrain.data.chat import tokenizer_hash
from drafttrain.data.config import PromptSet
from drafttrain.data.measured import not_compared, note_compared
from drafttrain.data.report import CorpusReport
from drafttrain.self_draft.build import build_ngrams, corpus_of
from drafttrain.self_draft.config import NgramConfig, TuneConfig
from drafttrain.self_draft.corpus_cache import FILE, CorpusCache
from drafttrain.self_draft.tuning import tune_self_draft
from drafttrain.target_lm.loading import load_for_decoding, load_tokenizer
from drafttrain.utils.files import read_json
from drafttrain.utils.provenance import content_hash


def make_ngrams(
    config: NgramConfig,
    target: str,
    out: Path,
    measured: Sequence[PromptSet],
    keys: tuple[str, str],
    tuning: TuneConfig | None,
    dtype: str = "auto",
    device: str = "auto",
) -> dict[str, int]:
    """Count n-grams and, with a tuning, tune Self-Draft for them.

    Args:
        measured: prompts that the bundle will be measured on: no text may hold one.
        keys: of the recipe, with the sources and with what is excluded from them.

    Raises:
        UserError: a text does, or a setting or a source is unusable.
    """
    report = build_ngrams(config, load_tokenizer(target), out, measured, keys)
    note_compared(out, measured)
    if tuning is not None:
        model = load_for_decoding(target, dtype=dtype, device=device)
        tune_self_draft(tuning, model, CorpusCache.open(out, tokenizer_hash(model.tokenizer)), out)
    return {"tokens": report["tokens"]}


def check_ngrams(
    config: NgramConfig, target: str, folder: Path, measured: Sequence[PromptSet], keys: tuple[str, str]
) -> None:
    """Compare n-grams with prompts that have been named since they were counted. Their sources are read
    again; a line says so where one has changed or is gone.

    Args:
        config, measured, keys: as for `make_ngrams`.

    Raises:
        UserError: a text holds one of these prompts.
    """
    if not (new := not_compared(folder, measured)):
        return
    counted = read_json(folder / FILE)["sources"]
    for source, known in zip(config.sources, counted, strict=False):
        if not Path(source.path).exists() or content_hash(source.path) != known["hash"]:
            paths = ", ".join(one.path for one in new)
            line = f"ngrams: {paths} cannot be compared with them, as {source.path} has changed or is gone"
            Console(stderr=True).print(line, style="yellow", markup=False, soft_wrap=True)
            return
    read = corpus_of(config)
    for _ in unmeasured_conversations(read, load_tokenizer(target), CorpusReport(), new, keys):
        pass
    note_compared(folder, new)
