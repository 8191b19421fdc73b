"""EDD beside its baselines: what is trained how often, and which numbers become figures."""

import gzip
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from drafttrain.bundle import load_bundle
from drafttrain.data.config import Source
from drafttrain.data.prompts import Prompt
from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.training.config import TrainingConfig
from drafttrain.utils.errors import UserError
from studies import goals
from studies.edd import answer_lengths, equal, figure5, on_policy, table1, table3, variants
from studies.edd import bench as bench_module
from studies.figures import drafters
from studies.goals import Run


class Trained:
    """Stands for `Bench`: each training returns a number that depends on what was asked."""

    def __init__(self, value, loss=lambda drafter, training: 1.0):
        self.value, self.loss, self.asked, self.out = value, loss, [], Path("nowhere")
        self.responses = "answers.jsonl"

    def states(self, *args):
        return {}

    def trained(self, name, drafter, training, made_from, decode=True):
        self.asked.append((name, drafter, training, decode))
        emitted = self.value(drafter, training)
        tasks = {
            task: {
                "emitted": emitted * 10,
                "steps": 10,
                "accept_len": emitted,
                "accept_len_nonrepeated": 1.0,
                "by_prompt": [[emitted * 2, 2]] * 5,
            }
            for task in ("mt_bench", "gsm8k", "humaneval")
        }
        return {
            "lr": training.lr,
            "seed": training.seed,
            "tokens": 5,
            "accept_len": emitted,
            "tasks": tasks if decode else {},
            "commit": "a",
            "validation": {"eval_accept_len": emitted, "eval_loss": self.loss(drafter, training)},
        }


def test_table1_gives_every_kind_the_same_choice_and_three_seeds():
    best = {"edd": 4e-3, "eagle": 1e-3, "medusa": 2e-3, "vdm": 2e-3}
    bench = Trained(lambda d, t: 2.0 - abs(t.lr - best[d.kind]) * 100 - 0.1 * (t.seed or 0))
    found = table1.table1(bench)
    for kind in table1.KINDS:
        trials = [t.lr for _, d, t, decode in bench.asked if d.kind == kind and not decode]
        finals = [(t.lr, t.seed) for _, d, t, decode in bench.asked if d.kind == kind and decode]
        assert trials == list(bench_module.RATES) and finals == [(best[kind], seed) for seed in (0, 1, 2)]
        row = found["rows"][kind]
        assert row["accept_len"] == pytest.approx(1.9) and row["range"] == pytest.approx([1.8, 2.0])
    settings = [asdict(t) | {"lr": 0, "seed": 0} for _, _, t, decode in bench.asked if decode]
    assert all(one == settings[0] for one in settings)  # data, steps and everything else are equal


def test_rates_that_are_as_good_are_told_apart_by_their_loss():
    lengths = {1e-3: 1.2, 2e-3: 1.595, 4e-3: 1.6, 8e-3: 1.5}
    bench = Trained(
        lambda d, t: lengths[t.lr], lambda d, t: {1e-3: 0.1, 2e-3: 0.5, 4e-3: 0.6, 8e-3: 0.2}[t.lr]
    )
    assert bench_module.best_rate(bench, "edd", {})[0] == 2e-3


def test_table3_leaves_out_one_thing_at_a_time():
    bench = Trained(lambda d, t: 1.5)
    found = table3.table3(bench)
    full, finals = {}, [(n, d, t) for n, d, t, decode in bench.asked if decode]
    for name, drafter, training in finals:
        full.setdefault(name[:-1], (asdict(drafter), asdict(training) | {"seed": 0}))
    whole = full["edd-seed"]
    for name, change in (
        ("vdm-seed", {"kind": "vdm"}),
        ("edd-ce-seed", {"loss": "ce"}),
        ("edd-fixed5-seed", {"block_length": (5, 5)}),
    ):
        ours = whole[0] | whole[1]
        theirs = full[name][0] | full[name][1]
        assert {key: theirs[key] for key in ours if ours[key] != theirs[key]} == change
    assert set(found["rows"]) == {
        "everything",
        "no target states",
        "cross-entropy with the text",
        "blocks of 5",
    }


def test_figures_compare_equal_training_at_the_rate_best_for_it(monkeypatch):
    levels = {"edd": 1.5, "eagle": 1.6, "medusa": 1.6, "vdm": 1.4}
    favourite = {"edd": 1e-3, "eagle": 2e-3, "medusa": 4e-3, "vdm": 8e-3}

    def value(drafter, training):
        better = 0.1 * drafter.input_norms + 0.3 * drafter.anchor + 0.05 * (training.loss == "ce")
        worse = 0.01 * training.seed + 10 * abs(training.lr - favourite[drafter.kind])
        return levels[drafter.kind] + better - worse

    bench = Trained(value)
    bench.prompts = dict.fromkeys(drafters.TASKS, range(80))
    monkeypatch.setattr(drafters, "bench", lambda run: bench)
    found = drafters.equally_trained(Run("baselines"))
    assert set(found) == set(drafters.GROUPS[0].goals)
    assert {training.max_steps for _, _, training, _ in bench.asked} == {equal.STEPS}
    compared = {kind for pair in drafters.COMPARED.values() for kind in pair}
    assert {asked.partition("-equal")[0] for asked, *_ in bench.asked} == compared < set(equal.EQUAL)
    for name in compared:
        rates = [(t.lr, t.seed) for asked, _, t, _ in bench.asked if asked.startswith(f"{name}-equal")]
        best = favourite["eagle" if name.startswith("eagle") else name.partition("-")[0]]
        assert rates == [*((rate, 0) for rate in bench_module.RATES), (best, 1), (best, 2)]
    assert found["edd_vs_eagle"]["value"] == pytest.approx(1.49 / 1.59)
    low, high = found["edd_vs_eagle"]["interval"]  # seeds alone differ here
    assert 1.48 / 1.6 <= low < 1.49 / 1.59 < high <= 1.5 / 1.58
    assert found["edd_vs_eagle"]["seeds"] == [pytest.approx([1.48, 1.5]), pytest.approx([1.58, 1.6])]
    assert found["edd_vs_eagle_mtp"]["value"] == pytest.approx(1.49 / 1.69)
    assert found["best_vs_mtp_eagle"]["value"] == pytest.approx(1.79 / 1.69)
    assert found["kl_vs_ce"]["value"] == pytest.approx(1.49 / 1.54)
    assert found["states_vs_none"]["value"] == found["edd_vs_vdm"]["value"] == pytest.approx(1.49 / 1.39)
    assert found["edd_vs_medusa"]["tasks"]["gsm8k"] == pytest.approx(1.49 / 1.59)
    assert found["edd_vs_vdm"]["size"] == {"prompts": drafters.TASKS, "seeds": 3}
    assert found["edd_vs_vdm"]["commits"] == ["a"]


def test_a_figure_alone_trains_what_it_compares(monkeypatch, tmp_path, capsys):
    bench = Trained(lambda d, t: 1.5)
    bench.prompts = dict.fromkeys(drafters.TASKS, range(80))
    monkeypatch.setattr(drafters, "bench", lambda run: bench)
    monkeypatch.setattr(goals, "RAW", tmp_path)
    goals.measure_topic(drafters.GROUPS, Run("flagship"), ["kl_vs_ce", "edd_vs_vdm"])
    figures = [json.loads(line)["figure"] for line in capsys.readouterr().out.splitlines()]
    assert figures == ["edd_vs_vdm", "kl_vs_ce"]
    assert {asked.partition("-equal")[0] for asked, *_ in bench.asked} == {"edd", "edd-ce", "vdm"}


def test_intervals_are_over_prompts_and_seeds():
    random = np.random.default_rng(1)
    steps = random.integers(20, 60, size=40)
    alike = [[[2 * n, n] for n in steps.tolist()]] * 3
    assert drafters.interval({"a": alike}, {"a": alike}) == [1.0, 1.0]  # prompts are drawn together
    better = [[[3 * n, n] for n in steps.tolist()], alike[0], alike[0]]
    low, high = drafters.interval({"a": better}, {"a": alike})
    assert low == 1.0 and 4 / 3 <= high <= 1.5  # none or most of the seeds drawn
    mixed = [[[(2 + i % 2) * n, n] for i, n in enumerate(steps.tolist())]] * 3
    low, high = drafters.interval({"a": mixed}, {"a": alike})
    draws = random.integers(40, size=(4000, 40))
    shares = [steps[draw][draw % 2 == 1].sum() / steps[draw].sum() for draw in draws]
    assert [low, high] == pytest.approx(1 + np.quantile(shares, [0.025, 0.975]) / 2, abs=0.02)


def test_a_round_answers_the_hardest_prompts_again(tmp_path, monkeypatch):
    """Of eight chats the two in which least was accepted, against two drawn at random; each row goes on from
    the same drafter for as many steps."""
    questions = [{"id": f"q{i}", "conversations": [{"from": "human", "value": f"Say {i}"}]} for i in range(8)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    counts = [[9, 3, 15], [4, 4, 20], [0, 0, 0], [8, 3, 15], [5, 4, 20], [9, 4, 20], [8, 4, 20], [9, 3, 15]]
    (tmp_path / "on_policy.counts.json").write_text(json.dumps(counts))
    bench, asked, sources = Trained(lambda d, t: t.failed_weight), {}, []
    bench.out, bench.responses, bench.model = tmp_path, str(tmp_path / "text.jsonl"), "the target"
    bench.states = lambda name, text, blocks: sources.append((name, [one.path for one in text])) or {}

    def regenerate(config, model, out, dtype):
        [source] = config.sources
        rows = map(json.loads, Path(source.path).read_text().splitlines())
        asked[out.parent.name] = [row["conversations"][0]["value"] for row in rows]
        assert config.greedy_fraction == 0

    monkeypatch.setattr(on_policy, "regenerate", regenerate)
    monkeypatch.setattr(on_policy, "resolve_target", lambda name: name)
    found = on_policy.on_policy(bench)
    assert asked["round-hardest"] == ["Say 1", "Say 4"] and len(asked["round-random"]) == 2
    assert found["accept_len of the hardest"] == {"chosen": 9 / 8, "all": 52 / 25}
    names = ["edd-plain-seed0", "edd-round-same-seed0", "edd-round-random-seed0", "edd-round-hardest-seed0"]
    assert [name for name, *_ in bench.asked] == [*names, "edd-round-hardest-failed-seed0"]
    first, *rounds = [training for _, _, training, _ in bench.asked]
    assert first.init_from is None and {t.init_from for t in rounds} == {
        str(tmp_path / "edd-plain-seed0/drafter")
    }
    assert [t.failed_weight for t in rounds] == [1.0, 1.0, 1.0, 3.0]
    assert len({t.max_steps for t in rounds}) == len({t.lr for t in rounds}) == 1
    answers = str(tmp_path / "round-hardest/answers/responses.jsonl")
    assert sources[-1] == ("round-hardest", [bench.responses, answers])


def test_texts_of_each_length_have_as_many_tokens(tiny_bundle, tmp_path, monkeypatch):
    questions = [{"id": f"q{i}", "conversations": [{"from": "human", "value": f"Say {i}"}]} for i in range(8)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    bench, sources = Trained(lambda d, t: 1.0), {}
    bench.out, bench.responses, bench.model = tmp_path, str(tmp_path / "text.jsonl"), "the target"
    bench.target = load_bundle(tiny_bundle).target
    bench.states = lambda name, text, blocks: sources.update({name: text[0].path}) or {}

    def regenerate(config, model, out, dtype):
        out.mkdir()
        assert config.max_new_tokens == 512
        with open(out / "responses.jsonl", "w") as file:
            for i, row in enumerate(questions):
                answer = {"from": "gpt", "value": "x", "token_ids": [5 + i] * (512 if i % 3 else 200)}
                file.write(json.dumps(row | {"conversations": [*row["conversations"], answer]}) + "\n")

    monkeypatch.setattr(answer_lengths, "regenerate", regenerate)
    monkeypatch.setattr(answer_lengths, "resolve_target", lambda name: name)
    found = answer_lengths.answer_lengths(bench)
    assert bench.new_tokens == 256 and list(sources) == ["answers_128", "answers_256", "answers_512"]
    lengths = []
    for path in sources.values():
        rows = [json.loads(line)["conversations"] for line in Path(path).read_text().splitlines()]
        lengths.append([len(answer["token_ids"]) for _, answer in rows])
        assert all(
            answer["value"] == bench.target.tokenizer.decode(answer["token_ids"]) for _, answer in rows
        )
    assert lengths[0] == [128] * 8 and set(lengths[1]) == {200, 256} and max(lengths[2]) == 512
    texts = list(found["texts"].values())
    assert [text["tokens"] for text in texts] == [sum(one) for one in lengths]
    assert all(500 < text["tokens"] <= 1024 + 256 for text in texts)
    assert len({training.max_steps for _, _, training, _ in bench.asked}) == 1


def test_a_round_drafts_its_text_once(tiny_bundle, tiny_target, tmp_path):
    bench = Trained(lambda d, t: 1.0)
    bench.out, bench.model = tmp_path, load_bundle(tiny_bundle).target.name
    prompts = [Prompt("a", ["The fox"]), Prompt("b", ["A dog"])]
    counts = on_policy.drafted(bench, tiny_bundle, prompts)
    assert len(counts) == 2 and all(emitted >= steps > 0 for emitted, steps, _ in counts)
    assert on_policy.drafted(bench, tmp_path / "nowhere", prompts) == counts


def test_results_of_other_settings_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_module, "load_for_decoding", lambda name: None)
    monkeypatch.setattr(bench_module, "TASKS", {})
    bench = bench_module.Bench(tmp_path, 2, None)
    asked = {
        "drafter": asdict(bench_module.DRAFTER),
        "training": json.loads(json.dumps(asdict(bench_module.TRAINING))),
    }
    (tmp_path / "edd").mkdir()
    (tmp_path / "edd/asked.json").write_text(json.dumps(asked))
    (tmp_path / "edd/result.json").write_text(json.dumps({"limit": 2, "accept_len": 1.25}))
    assert bench.trained("edd", bench_module.DRAFTER, bench_module.TRAINING, {})["accept_len"] == 1.25
    shorter = bench_module.Bench(tmp_path, 2, 7)
    with pytest.raises(UserError, match="edd: trained with other settings; remove it"):
        shorter.trained("edd", bench_module.DRAFTER, bench_module.TRAINING, {})


def test_a_shorter_run_decodes_with_what_is_trained_and_keeps_the_longer_result(tmp_path, monkeypatch):
    def made(limit, **changes):
        bench = bench_module.Bench(tmp_path, limit, None, **changes)
        rows = {task: {"emitted": 3 * limit, "steps": 2 * limit} for task in bench.prompts}
        monkeypatch.setattr(bench, "accepted", lambda place: rows)
        monkeypatch.setattr(bench, "_train", None)  # nothing is trained again
        return bench.trained("edd", bench_module.DRAFTER, bench_module.TRAINING, {})

    monkeypatch.setattr(bench_module, "load_for_decoding", lambda name: None)
    monkeypatch.setattr(bench_module, "read_prompts", lambda path: [])
    (tmp_path / "edd").mkdir()
    file = tmp_path / "edd/result.json"
    trial = {"tasks": {}, "limit": 80, "commit": "a"}  # of a learning rate: nothing was decoded
    file.write_text(json.dumps(trial))
    whole = made(80)
    assert whole["accept_len"] == 1.5 and whole["commit"] == "a" and json.loads(file.read_text()) == whole
    few = made(2)
    assert few["limit"] == 2 and few["tasks"]["gsm8k"]["steps"] == 4 and json.loads(file.read_text()) == whole
    made(2, tasks={"mine": "prompts.jsonl"})
    assert json.loads(file.read_text()) == whole and made(80) == whole
    assert made(90)["limit"] == json.loads(file.read_text())["limit"] == 90
    with pytest.raises(UserError, match="edd: trained with other settings"):
        made(80, model="another target")


def test_a_corpus_of_other_answers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_module, "load_for_decoding", lambda name: None)
    monkeypatch.setattr(bench_module, "TASKS", {})
    monkeypatch.setattr(bench_module, "collect", lambda *words: None)
    bench = bench_module.Bench(tmp_path, 2, None)
    (tmp_path / "answers/corpus").mkdir(parents=True)
    sources = [{"path": "own.jsonl", "max_conversations": 5}]
    (tmp_path / "answers/corpus/corpus.json").write_text(json.dumps({"config": {"sources": sources}}))
    bench.states("answers", [Source("own.jsonl", max_conversations=5)], [-4])
    with pytest.raises(UserError, match="corpus: must be made from other.jsonl, got own.jsonl; remove"):
        bench.states("answers", [Source("other.jsonl", max_conversations=5)], [-4])


def test_answers_of_figure_5_are_whole_or_absent(tmp_path, monkeypatch):
    with gzip.open(tmp_path / "all.jsonl.gz", "wt") as file:
        file.write('{"id": "gsm8k-1"}\n{"id": "other-1"}\n')
    figure5.write_math(tmp_path / "all.jsonl.gz", tmp_path / "math.jsonl")
    assert (tmp_path / "math.jsonl").read_text() == '{"id": "gsm8k-1"}\n'
    monkeypatch.setattr(Path, "write_text", None)  # which a kill would leave half done
    figure5.write_math(tmp_path / "all.jsonl.gz", tmp_path / "math.jsonl")


def test_a_drafter_with_the_targets_head_drafts_all_tokens(tiny_target, tmp_path):

    drafter = new_drafter(tiny_target, DrafterConfig(kind="vdm", train_head=False), torch.arange(0, 512, 4))
    drafter.save_pretrained(tmp_path / "some")
    variants.draft_all_tokens(tmp_path / "some", tmp_path / "all")
    again = load_drafter(tmp_path / "all", tiny_target)
    assert torch.equal(again.lm_head.weight, tiny_target.lm_head.weight)
    assert torch.equal(again.layers[0].q_proj.weight, drafter.layers[0].q_proj.weight)


def test_trainings_from_before_a_setting_are_known():
    """An earlier version trained the same as this one would, if all that is new stays off."""
    old = json.loads(json.dumps({"drafter": asdict(DrafterConfig(kind="vdm")), "training": {"lr": 0.5}}))
    del old["drafter"]["anchor"], old["drafter"]["kv_heads"]
    now = {"drafter": asdict(DrafterConfig(kind="vdm")), "training": asdict(TrainingConfig(lr=0.5))}
    assert bench_module.with_defaults(old) == json.loads(json.dumps(now))


def test_words_of_the_studies(capsys, monkeypatch, tmp_path):
    """A part of a study is printed and not written; a kind that it does not have is one line."""
    bench = Trained(lambda d, t: 1.5)
    bench.out = tmp_path
    monkeypatch.setattr(bench_module, "Bench", lambda *words: bench)
    assert table1.main(["--kinds", "vdm", "--out", str(tmp_path)]) == 0
    assert "| vdm |" in capsys.readouterr().out and not list(tmp_path.iterdir())
    assert variants.main(["mtp", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mtp.json"]
    assert table1.main(["--kinds", "oak", "--out", str(tmp_path)]) == 2
    assert "--kinds: must be some of edd, eagle, medusa, vdm, got oak" in capsys.readouterr().err
    assert variants.main(["oak"]) == 2 and variants.main(["--help"]) == 0
