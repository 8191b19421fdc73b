"""The n-grams stage: count a cache from texts without measured prompts, and tune Self-Draft for it."""

from dataclasses import replace
from pathlib import Path

from drafttrain.data.build import unmeasured_conversations
from drafttrain.data.chat import tokenizer_hash
from drafttrain.data.measured import not_compared, note_changed, note_compared
from drafttrain.data.report import CorpusReport
from drafttrain.run.recipe import Recipe
from drafttrain.run.stages import NGRAMS, corpus_sources, measured_prompts
from drafttrain.run.target import target_model
from drafttrain.self_draft.build import build_ngrams, corpus_of
from drafttrain.self_draft.config import NgramConfig
from drafttrain.self_draft.corpus_cache import FILE, CorpusCache
from drafttrain.self_draft.tune_config import TuneConfig
from drafttrain.self_draft.tuning import tune_self_draft
from drafttrain.target_lm.loading import load_for_decoding, load_tokenizer
from drafttrain.utils.files import read_json


def make_ngrams(recipe: Recipe, folders: dict[str, Path], out: Path) -> dict[str, int]:
    """Count the n-grams of the sources and, if `calibrate.prompts` is set, tune Self-Draft on those prompts.

    Raises:
        UserError: a text holds a prompt that the bundle will be measured on, or a setting or a source is
            unusable.
    """
    (config, keys), measured, prompts = (
        _settings(recipe, folders),
        measured_prompts(recipe),
        recipe.calibrate.prompts,
    )
    target = target_model(recipe)
    report = build_ngrams(config, load_tokenizer(target), out, measured, keys)
    note_compared(out, measured)
    if prompts is not None:
        model = load_for_decoding(target, dtype=recipe.target.dtype, device=recipe.target.device)
        tuning = TuneConfig(prompts, recipe.calibrate.max_new_tokens, busy=recipe.calibrate.busy)
        tune_self_draft(tuning, model, CorpusCache.open(out, tokenizer_hash(model.tokenizer)), out)
    return {"tokens": report["tokens"]}


def check_ngrams(recipe: Recipe, run: Path, folders: dict[str, Path]) -> None:
    """Check that a run's n-grams hold none of the measured prompts that were added after they were counted.
    The sources are read again; if one has changed or is gone, a warning is printed instead.

    Raises:
        UserError: a text holds one of these prompts.
    """
    folder = run / NGRAMS
    if not (new := not_compared(folder, measured_prompts(recipe))):
        return
    config, keys = _settings(recipe, folders)
    counted = (known["hash"] for known in read_json(folder / FILE)["sources"])
    if note_changed("ngrams", new, zip((source.path for source in config.sources), counted)):
        return
    read = corpus_of(config)
    for _ in unmeasured_conversations(read, load_tokenizer(target_model(recipe)), CorpusReport(), new, keys):
        pass
    note_compared(folder, new)


def _settings(recipe: Recipe, folders: dict[str, Path]) -> tuple[NgramConfig, tuple[str, str]]:
    """Return the settings of counting, and the recipe keys that its sources and exclusions come from."""
    given = recipe.ngrams
    sources, exclude = (
        given.sources or corpus_sources(recipe, folders),
        given.exclude or recipe.corpus.exclude,
    )
    keys = ("ngrams" if given.sources else "corpus"), ("ngrams" if given.exclude else "corpus")
    config = replace(given, sources=sources, exclude=exclude)
    return config, (f"{keys[0]}.sources", f"{keys[1]}.exclude")
