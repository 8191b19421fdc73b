"""The short calibration on the tiny target: when it is made, where it is kept, and what it measures."""

import dataclasses
import itertools
import json
import shutil
import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafttrain.bundle import load_bundle
from drafttrain.calibration import quick, timing
from drafttrain.calibration.calibration import Calibration
from drafttrain.calibration.quick import calibration_here, is_disturbed, quick_calibration
from drafttrain.classifier.model import Classifier
from drafttrain.data.prompts import PromptSet, Task
from drafttrain.decoder import SpeculativeDecoder
from drafttrain.evaluation import evaluate as evaluation
from drafttrain.evaluation.benchmark_config import MethodSpec
from drafttrain.evaluation.methods import Methods
from drafttrain.evaluation.stock import load_stock
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.kernels.machine import describe_machine
from drafttrain.run.cli import main
from drafttrain.target_lm.loading import load_for_decoding
from drafttrain.target_lm.model import weights_hash
from drafttrain.utils.errors import UserError
from studies.calibrations import quick_against_full

CPU = {"dtype": "float32", "device": "cpu"}
VERIFY, DRAFT, GROW = timing._Clock.verify, timing._Clock.draft, timing._Clock.grow
FREE = ("chain:length=2", "eagle2:top_k=2,max_depth=2,total=3", "cape", "static:k_config=2-1")
FREE += ("paths:paths=0-1", "pct:threshold=0.2", "joint", "dymax", "ngram", "ngram+chain:length=2")


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """No other processes, a cache of the test's own, and no more measurements than a test needs."""
    loads = []
    load = SimpleNamespace(lap=lambda: loads.pop(0) if loads else 0.0)
    monkeypatch.setattr(quick, "OtherLoad", lambda: load)
    monkeypatch.setattr(quick, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(quick, "ROUNDS", 1)
    monkeypatch.setattr(quick, "NEW_TOKENS", 10)
    monkeypatch.setattr(quick, "TREE_SECONDS", 0.0)
    monkeypatch.setattr(quick, "CHAIN_SECONDS", 0.0)
    # as of a machine where drafting pays, which of this tiny target is not sure
    monkeypatch.setattr(timing._Clock, "verify", lambda clock, n: 1e-3 * (10 + n))
    monkeypatch.setattr(timing._Clock, "draft", lambda clock, f, width: 1e-3 * (1 + f / 8))
    monkeypatch.setattr(timing._Clock, "grow", lambda clock, f, width: None)
    return loads


@pytest.fixture
def measured(monkeypatch):
    """How often something was measured, and what with."""
    calls, measure = [], quick._measure
    monkeypatch.setattr(quick, "_measure", lambda *made: calls.append(made) or measure(*made))
    return calls


@pytest.fixture(scope="module")
def loaded(tiny_bundle):
    return load_bundle(tiny_bundle, **CPU)


@pytest.fixture(scope="module")
def found(loaded):
    """A calibration of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "ROUNDS", 1)
        patch.setattr(quick, "NEW_TOKENS", 10)
        return quick._measure(loaded.target, loaded.drafter, loaded.fingerprints, None)


@pytest.fixture
def bundle(tiny_bundle, found, tmp_path):
    """A function that makes a bundle whose own calibration has some other values."""

    def make(machine=None, **changes):
        folder = shutil.copytree(tiny_bundle, tmp_path / "bundle", dirs_exist_ok=True)
        machine = {**found.machine, **(machine or {})}
        changed = dataclasses.replace(found, machine=machine, quick=False, **changes)
        (folder / "calibration.json").write_text(json.dumps(changed.to_json()))
        return folder

    return make


def test_a_bundle_without_any_calibration(tiny_bundle, measured, monkeypatch, capsys):
    """With a real clock."""
    monkeypatch.setattr(timing._Clock, "verify", VERIFY)
    monkeypatch.setattr(timing._Clock, "draft", DRAFT)
    monkeypatch.setattr(timing._Clock, "grow", GROW)
    bundle = load_bundle(tiny_bundle, **CPU)
    assert bundle.calibration is None
    policy = bundle.proposer("timed").policy
    found = bundle.calibration_for("timed")
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert first.startswith(f"calibration: {tiny_bundle}: there is no calibration; calibrating for this ")
    assert second.startswith("calibration: calibrated in ") and ", kept in " in second
    here = describe_machine(torch.device("cpu"), torch.float32)
    assert found.quick and found.machine == {**here, "load": 0.0}
    assert policy.rate == found.rate > 0 and found.reached > 0 and found.step_overhead >= 0
    assert [curve.sizes for curve in found.target] == [list(quick.VERIFIED)]
    assert [curve.sizes for curve in found.drafter] == [list(quick.EXPANDED)]
    assert (found.growth is None) == (bundle.target.native is None)
    assert found.foreign(bundle.target, bundle.fingerprints) is None
    assert bundle.warning("timed") is None
    for curve in found.target + found.drafter + (found.growth or []):
        assert all(0 < low <= mid <= high for low, mid, high in zip(curve.lower, curve.median, curve.upper))
    assert len(measured) == 1


def test_drafts_by_it_are_exact(tiny_bundle):
    decoder = SpeculativeDecoder.from_pretrained(str(tiny_bundle), tree="timed", **CPU)
    ids = decoder.encode("The quick brown")
    wanted = decode_all(decoder.target, NoProposer(), [ids], 16)[0][0]
    assert decoder.generate(ids, 16).token_ids == wanted


@pytest.mark.parametrize("tree", FREE)
def test_policies_without_costs_do_not_wait(tree, bundle, measured, capsys):
    for folder in (bundle(machine={"processor": "another"}), bundle()):
        load_bundle(folder, **CPU).proposer(tree)
    assert not measured and "calibrating" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"machine": {"processor": "another"}}, "calibrated for processor another, and this is "),
        ({"machine": {"features": "sse"}}, "calibrated for features sse, and this is "),
        ({"machine": {"torch_isa": "DEFAULT"}}, "calibrated for torch_isa DEFAULT, and this is "),
        ({"machine": {"onednn_isa": "SSE41"}}, "calibrated for onednn_isa SSE41, and this is "),
        ({"machine": {"kernel": "other"}}, "calibrated for kernel other, and this is "),
        ({"machine": {"threads": 99}}, "calibrated for threads 99, and this is "),
        ({"dtype": "bfloat16"}, "calibrated for dtype bfloat16, and this is float32"),
    ],
)
@pytest.mark.parametrize("tree", ["timed", "pct:width=2", "ngram+timed:width=2"])
def test_a_foreign_calibration_is_not_used(changes, why, tree, bundle, measured, capsys):
    loaded = load_bundle(bundle(rate=12345.0, **changes), **CPU)
    loaded.proposer(tree)
    assert why in capsys.readouterr().err and len(measured) == 1
    used = loaded.calibration_for(tree.removeprefix("ngram+"))
    assert used.quick and used.rate != 12345.0
    own = loaded.calibration  # what belongs to the drafter is the bundle's
    assert (used.acceptance, used.promise, used.temperature) == (own.acceptance, own.promise, own.temperature)
    assert used.confidence == own.confidence and loaded.warning(tree) is None


def test_the_caches_take_the_costs_of_this_machine_alone(bundle, measured):
    tree = "ngram+pct:threshold=0.2"  # which itself takes none
    here, elsewhere = (load_bundle(bundle(machine=machine), **CPU) for machine in ({}, {"processor": "x"}))
    assert here.proposer(tree).ngrams.rate == here.calibration.rate
    assert elsewhere.proposer(tree).ngrams.verify is None and not measured


def test_an_older_calibration_is_foreign(bundle, measured, capsys):
    """One that does not say with which instructions it was made."""
    folder = bundle()
    values = json.loads((folder / "calibration.json").read_text())
    del values["machine"]["features"], values["machine"]["kernel"], values["quick"]
    (folder / "calibration.json").write_text(json.dumps(values))
    load_bundle(folder, **CPU).proposer("timed")
    assert len(measured) == 1 and "calibrated for a machine with unknown features" in capsys.readouterr().err


def test_the_same_machine_uses_the_bundles_own(bundle, measured):
    loaded = load_bundle(bundle(machine={"load": 0.3}), **CPU)
    assert loaded.proposer("timed").policy.rate == loaded.calibration.rate
    assert not measured


def test_one_that_is_named_is_used_wherever_it_was_made(bundle, measured):
    folder = bundle(machine={"processor": "another"})
    loaded = load_bundle(folder, calibration=folder, **CPU)
    assert loaded.proposer("timed").policy.rate == loaded.calibration.rate and not measured
    assert "calibrated for processor another" in loaded.warning("timed")


def test_python_warns_of_one_that_is_named_and_of_another_dtype(bundle, measured):
    folder = str(bundle(dtype="bfloat16"))
    with pytest.warns(UserWarning, match="calibrated for dtype bfloat16, and this is float32: trees may be"):
        SpeculativeDecoder.from_pretrained(folder, tree="timed", calibration=folder, **CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one that is made here needs no warning
        SpeculativeDecoder.from_pretrained(folder, tree="timed", **CPU)
    assert len(measured) == 1


def test_one_of_another_drafter_does_not_hold_for_this(bundle, measured):
    folder = bundle(made_for={"target": "x", "drafter": "y"}, acceptance=[0.123])
    loaded = load_bundle(folder, **CPU)
    loaded.proposer("timed")
    assert loaded.calibration_for("timed").acceptance != [0.123]


def test_a_wrong_setting_is_no_reason_to_measure(tiny_bundle, measured):
    with pytest.raises(UserError, match="did you mean width"):
        load_bundle(tiny_bundle, **CPU).proposer("timed:widht=3")
    with pytest.raises(UserError, match="needs a classifier"):
        load_bundle(tiny_bundle, **CPU).proposer("c2t")
    assert not measured


def test_it_is_made_once(tiny_bundle, measured, capsys):
    rates = set()
    for _ in range(3):
        bundle = load_bundle(tiny_bundle, **CPU)
        rates |= {bundle.proposer(tree).policy.rate for tree in ("timed", "timed:width=2")}
    assert len(measured) == 1 and len(rates) == 1
    assert capsys.readouterr().err.count("calibrating for this machine") == 1


@pytest.mark.parametrize("what", ["threads", "dtype"])
def test_another_machine_has_one_of_its_own(what, tiny_bundle, measured):
    load_bundle(tiny_bundle, **CPU).proposer("timed")
    other = load_bundle(tiny_bundle, **{**CPU, "dtype": "bfloat16" if what == "dtype" else "float32"})
    if what == "threads":
        torch.set_num_threads(2)
    try:
        other.proposer("timed")
    finally:
        torch.set_num_threads(1)
    assert len(measured) == 2


def test_methods_of_a_benchmark_share_it(tiny_bundle, tiny_target_folder, measured, monkeypatch, tmp_path):
    """Even where it cannot be kept, and where another bundle was loaded in between."""
    monkeypatch.setattr(quick, "cache_dir", lambda: tiny_bundle / "config.json")  # no folder
    other = shutil.copytree(tiny_bundle, tmp_path / "other")
    target = load_for_decoding(str(tiny_target_folder), **CPU)
    specs = [MethodSpec("a", str(tiny_bundle), "timed"), MethodSpec("b", str(other), "chain:length=1")]
    specs += [MethodSpec("c", str(tiny_bundle), "pct"), MethodSpec("d", str(tiny_bundle), "timed:width=2")]
    Methods(target, specs, load_stock(target, False, []))
    assert len(measured) == 1


def test_an_evaluation_proves_exact_what_it_timed(tiny_bundle, questions, measured, monkeypatch, tmp_path):
    """The trees that were timed in one dtype are decoded in fp32 by the same costs."""
    monkeypatch.setattr(evaluation, "check_quiet", lambda refuse: None)
    prompts = PromptSet("own", str(questions), 1)
    config = evaluation.EvaluateConfig([prompts], trees=["timed"], max_new_tokens=6, lossless_prompts=1)
    config.lossless_new_tokens = 6
    figures = evaluation.evaluate(config, tiny_bundle, tmp_path / "out", dtype="bfloat16", device="cpu")
    assert figures["lossless"] and len(measured) == 1
    assert measured[0][0].dtype == torch.bfloat16


def test_an_unwritable_cache(tiny_bundle, measured, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(quick, "cache_dir", lambda: tmp_path / "file")
    for _ in range(2):
        load_bundle(tiny_bundle, **CPU).proposer("timed")
    assert len(measured) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "cannot be written" in line]
    assert len(lines) == 2 and f"{tmp_path}/file/calibrations: cannot be written (" in lines[0]


def test_an_interrupted_one_is_not_kept(tiny_bundle, measured, monkeypatch, tmp_path):
    def interrupt(*made):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(quick, "best_rate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_bundle(tiny_bundle, **CPU).proposer("timed")
    assert not list(tmp_path.glob("cache/calibrations/*"))
    load_bundle(tiny_bundle, **CPU).proposer("timed")
    assert len(measured) == 2


def test_costs_are_those_of_decoding(tiny_bundle, monkeypatch):
    """After an operator on several threads torch's team would keep the cores from the next native call."""
    bundle, threads = load_bundle(tiny_bundle, **CPU), []
    monkeypatch.setattr(
        timing._Clock, "verify", lambda clock, n: threads.append(torch.get_num_threads()) or VERIFY(clock, n)
    )
    torch.set_num_threads(2)
    try:
        timing.measure_costs(bundle.target, bundle.drafter, 2, (8,), rounds=1, verified=(1, 2), expanded=(1,))
    finally:
        torch.set_num_threads(1)
    assert set(threads) == {2 if bundle.target.native is None else 1}


@pytest.mark.parametrize("content", ["", '{"format_version": 1, "target": [', "{}", '{"format_version": 0}'])
def test_a_damaged_one_is_made_again(content, tiny_bundle, measured, tmp_path, capsys):
    load_bundle(tiny_bundle, **CPU).proposer("timed")
    [kept] = tmp_path.glob("cache/calibrations/*.json")
    kept.write_text(content)
    load_bundle(tiny_bundle, **CPU).proposer("timed")
    assert len(measured) == 2 and f"{kept} is damaged; calibrating" in capsys.readouterr().err
    assert Calibration.load(kept).quick


def test_a_disturbed_one_is_repeated_once(tiny_bundle, measured, quiet, tmp_path, capsys):
    quiet += [0.8, 0.1]
    load_bundle(tiny_bundle, **CPU).proposer("timed")
    assert len(measured) == 2 and list(tmp_path.glob("cache/calibrations/*.json"))
    assert "other processes" not in capsys.readouterr().err


def test_one_that_stays_disturbed_is_used_with_a_warning(tiny_bundle, measured, quiet, tmp_path, capsys):
    quiet += [0.8, 0.9]
    bundle = load_bundle(tiny_bundle, **CPU)
    bundle.proposer("timed")
    bundle.proposer("pct")
    [kept] = tmp_path.glob("cache/calibrations/*.json")
    said = f"while other processes took 0.9 cores, kept in {kept} until the machine is quiet"
    assert len(measured) == 2 and said in capsys.readouterr().err


def test_a_disturbed_one_is_used_until_the_machine_is_quiet(
    tiny_bundle, measured, quiet, tmp_path, capsys, monkeypatch
):
    is_busy = iter(["other processes take 0.9 cores", None])
    monkeypatch.setattr(quick, "check_quiet", lambda refuse, seconds: next(is_busy))
    quiet += [0.8, 0.9]
    for number in (2, 2, 3, 3):  # the last is undisturbed, and nobody looks at the machine any more
        load_bundle(tiny_bundle, **CPU).proposer("timed")
        assert len(measured) == number
    [kept] = tmp_path.glob("cache/calibrations/*.json")
    said = capsys.readouterr().err
    assert f"{kept} was disturbed; it is used as long as the machine is busy" in said
    assert f"{kept} was disturbed, and now the machine is quiet; calibrating" in said


def test_a_system_that_does_not_report_its_load(tiny_bundle, measured, quiet, tmp_path):
    quiet += [None]
    load_bundle(tiny_bundle, **CPU).proposer("timed")
    assert len(measured) == 1 and list(tmp_path.glob("cache/calibrations/*.json"))


def test_curves_and_rate_of_known_costs(loaded, monkeypatch):
    """With a clock that gives known times the curves are these, and a slower machine beats lower rates."""
    rates = []
    for unit in (1e-3, 4e-3):

        class Clock:
            def __init__(self, target, drafter, context, verified, expanded):
                assert (context, verified, expanded) == (256, quick.VERIFIED, quick.EXPANDED)

            def verify(self, n, unit=unit):
                return unit * (10 + n)

            def draft(self, f, width, unit=unit):
                return unit * (1 + f / 8)

            def grow(self, f, width, unit=unit):
                return unit * sum(0.5 + n / 16 for n in timing._layers(f, width))

        with monkeypatch.context() as patch:
            patch.setattr(timing, "_Clock", Clock)
            patch.setattr(quick, "step_overhead", lambda found, stats, policy: 0.0)
            found = quick_calibration(loaded.target, loaded.drafter, loaded.fingerprints)
        costs = found.costs
        for n in (1, 3, 20, 64):
            assert costs.verify(n) == pytest.approx(unit * (10 + n))
        sizes = (1, 6, 16)
        assert [costs.layer(f) for f in sizes] == pytest.approx([unit * (1 + f / 8) for f in sizes])
        assert [costs.draft(f) for f in sizes] == pytest.approx([unit * (0.5 + f / 16) for f in sizes])
        assert found.reached <= 6 / costs.verify(1)
        rates.append((found.rate, found.reached))
    assert [4 * slow for slow in rates[1]] == pytest.approx(list(rates[0]), rel=1e-3)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_layers_of_a_tree_widen_to_the_nodes_that_are_expanded(width):
    for f in (1, 2, 3, 8, 32):
        layers = timing._layers(f, width)
        assert layers[0] == 1 and layers[-timing.STEPS :] == [f] * timing.STEPS
        assert all(a <= b <= max(width, 2) * a for a, b in pairwise(layers))


def test_a_model_that_was_given_has_costs_of_its_own(tiny_bundle, tiny_target_folder, measured):
    """Its forward is the stock one, and takes other times."""
    native = load_bundle(tiny_bundle, **CPU)
    native.proposer("timed")
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    decoder = SpeculativeDecoder.from_pretrained(str(tiny_bundle), target=model, tree="timed")
    assert decoder.target.native is None
    assert len(measured) == (1 if native.target.native is None else 2)


def test_a_new_calibration_of_the_bundle_counts(bundle, measured):
    for acceptance, number in (([0.5, 0.4], 1), ([0.5, 0.4], 1), ([0.6, 0.4], 2)):
        load_bundle(bundle({"processor": "another"}, acceptance=acceptance), **CPU).proposer("timed")
        assert len(measured) == number


def test_thresholds_of_c2t_are_what_time_is_worth(loaded, found, monkeypatch, measured):
    """A node has to bring as many tokens as its seconds would bring elsewhere."""
    classifier = Classifier(hidden=1)
    made = quick_calibration(loaded.target, loaded.drafter, loaded.fingerprints, found, classifier)
    costs = made.costs
    token = (costs.verify(9) - costs.verify(1)) / 8
    expand = made.reached * (costs.layer(1) + token) / made.acceptance[0]
    assert made.beta == pytest.approx(min(max(made.reached * token, 0.005), 0.95))
    assert made.expand == pytest.approx(min(max(expand, 0.005), 0.95)) and made.top_k == quick.WIDTH
    assert 0 < made.beta <= made.expand < 1


def test_a_stored_threshold_is_computed_again(bundle, tmp_path, measured):
    """For this machine; where the stored one is for another classifier, the paper's is used as ever."""
    classifier = Classifier(hidden=1)
    classifier.save(tmp_path / "classifier", {})
    options = {**CPU, "classifier": tmp_path / "classifier"}
    folder = bundle()
    made_for = load_bundle(folder, **CPU).calibration.made_for
    thresholds = {"beta": 0.31, "expand": 0.42, "top_k": 3}
    for hash, foreign, measures in (
        ("another", "P", 0),
        (weights_hash(classifier), None, 0),
        (weights_hash(classifier), "P", 1),
    ):
        machine = {"processor": foreign} if foreign else {}
        folder = bundle(machine=machine, made_for={**made_for, "classifier": hash}, **thresholds)
        loaded = load_bundle(folder, **options)
        policy = loaded.proposer("c2t").policy
        assert len(measured) == measures
    here = loaded.calibration_for("c2t")
    assert (policy.beta, policy.expand, policy.top_k) == (here.beta, here.expand, quick.WIDTH)
    assert loaded.proposer("c2t:beta=0.7").policy.beta == 0.7


def test_a_short_target_or_none_at_all(loaded, monkeypatch):
    monkeypatch.setattr(loaded.target.config, "max_position_embeddings", 100)
    made = loaded.target, loaded.drafter, loaded.fingerprints
    found = quick_calibration(*made)
    assert [curve.context for curve in found.target] == [36]
    monkeypatch.setattr(loaded.target.config, "max_position_embeddings", 40)
    with pytest.raises(UserError, match="must have more than 64 positions to be timed, got 40"):
        quick_calibration(*made)


def test_a_target_that_answers_nothing(loaded, monkeypatch):
    monkeypatch.setattr(quick.Decoding, "run", lambda *given, **more: DecodeStats(new_tokens=1))
    with pytest.raises(
        UserError, match="must answer the built-in prompts with more than one token, got single"
    ):
        calibration_here(loaded.target, loaded.drafter, loaded.fingerprints, "why")


def test_prompts_are_decoded_until_even_and_odd_ones_have_drafts(loaded, monkeypatch):
    """On a slow target, too."""
    answers = iter([5, 1, 5, 5, 5, 5])
    monkeypatch.setattr(quick.time, "perf_counter", itertools.count(0, 60).__next__)
    made = (
        loaded.target,
        loaded.drafter,
        1.0,
        lambda decoding: DecodeStats(prompts=1, new_tokens=next(answers)),
    )
    assert quick._decode(*made, 2).prompts == 4
    assert quick._decode(*made, 1).prompts == 2


def test_from_the_command_line(tiny_bundle, found, bundle, tmp_path, capsys, measured):
    words = ["calibrate", str(tiny_bundle), "--dtype", "float32", "--quick", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    made = Calibration.load(tmp_path / "out")
    assert made.quick and (tmp_path / "out/costs.png").exists()
    assert "timed is predicted to emit" in capsys.readouterr().out
    folder = bundle(machine={"processor": "another"}, acceptance=[0.5, 0.25])
    assert main(["calibrate", str(folder), "--dtype", "float32", "--quick"]) == 0
    loaded = load_bundle(folder, **CPU)
    assert loaded.calibration.quick and loaded.calibration.acceptance == [0.5, 0.25]
    loaded.proposer("timed")
    assert len(measured) == 2  # the bundle's own is from here now
    (folder / "calibration.json").write_text("{}")
    assert main(["calibrate", str(folder), "--dtype", "float32", "--quick"]) == 0
    for rest in ([], ["--quick", "--prompts", "x"]):
        assert main(["calibrate", str(folder), *rest]) == 2
        assert "--prompts, --quick: exactly one must be given" in capsys.readouterr().err


def test_against_a_full_one(loaded, found, questions, tmp_path):
    task = Task.read(PromptSet("own", str(questions), 2))
    full = dataclasses.replace(found, quick=False, rate=2 * found.rate)
    row = quick_against_full(loaded, full, task, tmp_path / "raw", max_new_tokens=8, repeats=2)
    assert row["ratio"] == row["tokens_per_second"]["quick"] / row["tokens_per_second"]["full"] > 0
    assert row["seconds"] > 0 and row["load"] == 0.0 and row["rates"]["full"] == full.rate
    low, high = row["interval"]
    assert low <= high and len((tmp_path / "raw/measurements.jsonl").read_text().splitlines()) == 5
    assert not is_disturbed(Calibration.load(tmp_path / "raw/calibration.json"))
