"""Self-Draft is tuned by decoding, stored, loaded, and used from files, the command line and Python."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest

from drafttrain.bundle import load_bundle
from drafttrain.data.config import PromptSet, Source
from drafttrain.decoder import SpeculativeDecoder
from drafttrain.export.config import ExportConfig
from drafttrain.export.write import export
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.run.cli import main
from drafttrain.self_draft.build import build_ngrams
from drafttrain.self_draft.candidates import CandidateModel
from drafttrain.self_draft.config import NgramConfig
from drafttrain.self_draft.corpus_cache import DATA, CorpusCache
from drafttrain.self_draft.hybrid import HybridProposer
from drafttrain.self_draft.proposer import SelfDraftConfig
from drafttrain.self_draft.settings import SETTINGS as FILE
from drafttrain.self_draft.settings import SelfDraftSettings, corpus_hash, load_self_draft, open_corpus
from drafttrain.self_draft.tune_config import TuneConfig
from drafttrain.self_draft.tuning import fit_odds, tune_self_draft
from drafttrain.trees.costs import CostCurve
from drafttrain.utils.errors import UserError
from tests.conftest import SENTENCES


@pytest.fixture(scope="module")
def cache(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("ngrams")
    (folder / "texts.txt").write_text("\n\n".join(SENTENCES * 3))
    config = NgramConfig([Source(str(folder / "texts.txt"))], processes=1, held_out=0.0)
    build_ngrams(config, tiny_llama[1], folder / "cache")
    return folder / "cache"


@pytest.fixture
def tuned(tmp_path, tiny_target, cache, questions):
    config = TuneConfig(PromptSet("tuning", str(questions)), 10, ((0, 6), (2, 3)), (1.0, 2.0))
    folder = shutil.copytree(cache, tmp_path / "tuned")
    return folder, tune_self_draft(config, tiny_target, open_corpus(tiny_target, folder), folder)


def test_tuning(tuned, tiny_target):
    folder, found = tuned
    assert SelfDraftSettings.load(folder) == found
    assert len(found.tried) == 4 and {row["branches"] for row in found.tried} == {0, 2}
    best = max(found.tried, key=lambda row: row["tokens_per_second"])
    assert found.config.branches == best["branches"] and round(found.rate, 2) == best["rate"]
    assert found.made_for == tiny_target.fingerprint and found.verify(4) > 0
    assert {"corpus", "prompt", "recycled"} & {source for source, _, _ in found.odds.weights}


def test_the_logistic_model_finds_what_made_the_data():
    first, second = ("a", 1, 0), ("b", 2, 1)
    shares = {(first,): 0.2, (second,): 0.5, (first, second): 0.9}
    judged = Counter()
    for evidence, share in shares.items():
        judged[evidence, True], judged[evidence, False] = round(4000 * share), round(4000 * (1 - share))
    odds = fit_odds(judged)
    for evidence, share in shares.items():
        assert odds(evidence) == pytest.approx(share, abs=0.01)
    assert fit_odds(Counter({((first,), True): 9})) == CandidateModel()


def test_settings_come_back_as_they_were(tmp_path):
    settings = SelfDraftSettings(
        SelfDraftConfig(branches=3, seed=5),
        CandidateModel(-0.5, {("corpus", 2, 1): 0.25}, {3: 1.5}),
        CostCurve((1, 4), (0.1, 0.2)),
        50.0,
    )
    settings.save(tmp_path / "new")
    loaded = SelfDraftSettings.load(tmp_path / "new")
    assert loaded.config == settings.config and loaded.odds == settings.odds and loaded.rate == 50.0
    assert loaded.verify(2) == settings.verify(2)
    replace(settings, verify=None).save(tmp_path)
    assert SelfDraftSettings.load(tmp_path).verify is None


@pytest.mark.parametrize("text", ["[]", "{}", '{"format_version": 9}'])
def test_damaged_settings_are_one_line(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match="damaged, or of another version; write it again"):
        SelfDraftSettings.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("config", {"gram": "x"}),
        ("odds", {}),
        ("odds", {"bias": 0.0, "weights": [["corpus", 2, 1, "x"]], "agreement": {}}),
        ("rate", float("nan")),
        ("machine", []),
        ("dtype", 3),
    ],
)
def test_a_damaged_setting_is_one_line(tmp_path, key, value):
    SelfDraftSettings().save(tmp_path)
    assert SelfDraftSettings.load(tmp_path) == SelfDraftSettings()
    whole = json.loads((tmp_path / FILE).read_text())
    assert key in whole
    (tmp_path / FILE).write_text(json.dumps(whole | {key: value}))
    with pytest.raises(UserError, match=f"{FILE}: damaged, or of another version; write it again"):
        SelfDraftSettings.load(tmp_path)


def test_loading(tmp_path, tiny_target, cache):
    assert load_self_draft(tiny_target).corpus is None
    assert load_self_draft(tiny_target, cache).corpus.gram == 5
    SelfDraftSettings(rate=7.0).save(tmp_path)
    found = load_self_draft(tiny_target, tmp_path)
    assert found.corpus is None and found.rate == 7.0
    with pytest.raises(UserError, match="neither an n-gram cache nor settings"):
        load_self_draft(tiny_target, tmp_path / "nowhere")
    foreign = shutil.copytree(cache, tmp_path / "foreign")
    header = json.loads((foreign / "ngrams.json").read_text())
    (foreign / "ngrams.json").write_text(json.dumps({**header, "tokenizer_hash": "0" * 16}))
    with pytest.raises(UserError, match="made with another tokenizer"):
        load_self_draft(tiny_target, foreign)
    cut = shutil.copytree(cache, tmp_path / "cut")
    (cut / DATA).write_bytes((cut / DATA).read_bytes()[:-8])
    with pytest.raises(UserError, match="cut off"):
        load_self_draft(tiny_target, cut)


def test_a_bundle_with_a_cache(tmp_path, tiny_bundle, cache):
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    plain = load_bundle(folder, dtype="float32", device="cpu")
    assert plain.ngrams is None and plain.proposer("ngram").corpus is None  # the text at hand alone
    for file in cache.iterdir():
        shutil.copy(file, folder)
    bundle = load_bundle(folder, dtype="float32", device="cpu")
    assert bundle.proposer("ngram") is bundle.ngrams and bundle.ngrams.corpus is not None
    joined = bundle.proposer("ngram+chain:length=2")
    assert isinstance(joined, HybridProposer) and joined.drafter.policy.length == 2
    assert bundle.warning("ngram+chain:length=2") is None
    prompts = [[5, 6, 7], [9]]
    wanted = decode_all(bundle.target, NoProposer(), prompts, 12)[0]
    for tree in ("ngram", "ngram+chain:length=2"):
        assert decode_all(bundle.target, bundle.proposer(tree), prompts, 12)[0] == wanted
    with pytest.raises(UserError, match="there is no policy 'nothing'"):
        bundle.proposer("ngram+nothing")
    with pytest.raises(UserError, match=r"choose one of chain, .*, ngram, ngram\+POLICY$"):
        bundle.proposer("nothing")
    with pytest.raises(UserError, match=r"did you mean ngram\?"):
        bundle.proposer("ngrams")
    with pytest.raises(
        UserError, match=r"ngrams: must come with tree ngram or ngram\+POLICY, got tree chain:"
    ):
        SpeculativeDecoder.from_pretrained(
            str(tiny_bundle), dtype="float32", device="cpu", tree="chain:length=2", ngrams=str(cache)
        )


def test_a_bundle_is_exported_with_its_cache(tmp_path, tiny_bundle, cache):
    out = export(ExportConfig(name="x", ngrams=str(cache)), tiny_bundle, tmp_path / "out")
    assert load_bundle(out, dtype="float32", device="cpu").ngrams.corpus is not None
    with pytest.raises(UserError, match="no n-gram cache here"):
        export(ExportConfig(name="x", ngrams=str(tmp_path)), tiny_bundle, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_in_python(tiny_target_folder, cache):
    decoder = SpeculativeDecoder.self_draft(
        str(tiny_target_folder), str(cache), dtype="float32", device="cpu"
    )
    result = decoder.generate("The quick brown", 12)
    assert result.token_ids == decoder.autoregressive("The quick brown", 12).token_ids


def test_on_the_command_line(tiny_target_folder, cache, questions, tmp_path, capsys):
    target = ["--target", str(tiny_target_folder)]
    words = ["--prompts", str(questions), "--limit", "2", "--max-new-tokens", "6", "--dtype", "float32"]
    out = tmp_path / "settings"
    assert main(["calibrate", *target, "--ngrams", str(cache), *words, "--out", str(out)]) == 0
    assert "fastest:" in capsys.readouterr().out and (out / FILE).exists()
    generate = ["generate", *target, "--prompt", "The quick", "--max-new-tokens", "6", "--dtype", "float32"]
    for folder in (cache, out):  # to which the cache has been copied
        assert main([*generate, "--ngrams", str(folder)]) == 0
        found = capsys.readouterr()
        assert "same output" in found.out and "tuned for" not in found.err
    assert corpus_hash(CorpusCache.open(out)) == corpus_hash(CorpusCache.open(cache))
    for words, message in (
        (["calibrate", *target, "--prompts", "x"], "--out: must be given without --ngrams"),
        (["calibrate", *target, "--prompts", "x", "--ngrams", str(tmp_path)], "no n-gram cache here"),
        (
            ["generate", "--prompt", "x"],
            "--bundle: must be given, got none; without one --target drafts for itself",
        ),
        (
            [*generate, "--tree", "chain"],
            "--bundle: must be given, got none; without one --target drafts for itself",
        ),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
