"""The benchmark end to end on a tiny target: two drafters that read different blocks, and what needs none."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from drafttrain.data.config import PromptSet
from drafttrain.data.prompts import Prompt, Task, read_prompts
from drafttrain.drafters.edd import DrafterConfig, EddConfig, EddModel
from drafttrain.evaluation import benchmark as module
from drafttrain.evaluation.benchmark import benchmark, limited, make_rows
from drafttrain.evaluation.benchmark_config import BenchmarkConfig, MethodSpec, TaskSpec
from drafttrain.evaluation.metrics import Measurement, context_range
from drafttrain.target_lm.loading import load_target
from drafttrain.utils.errors import UserError
from tests.conftest import write_jsonl

OURS = ["autoregressive", "edd", "other", "ngram", "prompt_lookup"]


@pytest.fixture(scope="module")
def other_bundle(tiny_target_folder, tmp_path_factory) -> Path:
    """A drafter that reads two blocks, neither of which is `tiny_bundle`'s."""
    target = load_target(str(tiny_target_folder), dtype="float32", device="cpu")
    settings = DrafterConfig(tapped_blocks=[0, 3])
    torch.manual_seed(1)
    drafter = EddModel(EddConfig.for_target(target, settings, 300))
    drafter.initialize_from(target, settings, torch.arange(300))
    folder = tmp_path_factory.mktemp("bundles") / "other"
    drafter.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(module, "check_quiet", lambda refuse: None)


@pytest.fixture
def config(tiny_target_folder, tiny_bundle, other_bundle, questions, tmp_path) -> BenchmarkConfig:
    rows = [{"question_id": i, "category": c, "turns": [f"Say {i}."]} for i, c in enumerate("aabb")]
    grouped = write_jsonl(tmp_path / "grouped.jsonl", rows)
    methods = [
        f"edd={tiny_bundle}@chain:length=3",
        f"other={other_bundle}@eagle2:top_k=2,max_depth=3,total=6",
    ]
    methods += [f"ngram={tiny_bundle}@ngram", "prompt_lookup"]
    return BenchmarkConfig(
        target=str(tiny_target_folder),
        methods=[MethodSpec.parse(text) for text in methods],
        tasks=[TaskSpec.parse(f"chats={questions}"), TaskSpec.parse(f"bench={grouped}")],
        limit=1,
        temperatures=[0.0, 1.0],
        repeats=2,
        max_new_tokens=6,
        dtype="float32",
        device="cpu",
    )


@pytest.fixture
def small(config) -> BenchmarkConfig:
    """One chat, two methods, once."""
    once = {"limit": 1, "temperatures": [0.0], "repeats": 1}
    return dataclasses.replace(config, methods=config.methods[:2], tasks=config.tasks[:1], **once)


def raw(out: Path) -> list[Measurement]:
    lines = (out / "measurements.jsonl").read_text().splitlines()[1:]
    return [Measurement.from_json(json.loads(line)) for line in lines]


def test_a_warning_is_printed_without_markup(small, tmp_path, monkeypatch, capsys):
    class Warned(module.Methods):
        def __init__(self, *args, **rest):
            super().__init__(*args, **rest)
            self.warnings = ["edd: calibrated elsewhere: runs/[/x]/[red]drafter"]

    monkeypatch.setattr(module, "Methods", Warned)
    benchmark(small, tmp_path / "out")
    assert "edd: calibrated elsewhere: runs/[/x]/[red]drafter\n" in capsys.readouterr().out


def test_end_to_end_and_resumed(config, tmp_path, capsys):
    out = tmp_path / "out"
    summary = benchmark(config, out)
    printed = capsys.readouterr().out
    assert json.loads((out / "benchmark.json").read_text()) == summary
    names = [*OURS[:1], "transformers", *OURS[1:]]
    assert list(summary["methods"]) == names
    assert summary["methods"]["transformers"] == {"dtype": "float32", "tokens_per_second": {}}
    assert "float32 (transformers in float32)" in " ".join(printed.split())
    assert list(summary["tasks"]) == ["chats", "bench/a", "bench/b"]

    # both turns of a chat, a prompt of each group; two repeats, two temperatures
    measured = raw(out)
    assert len(measured) == 2 * 2 * (2 + 1 + 1)
    for one in measured:
        ours = {tuple(one.runs[name].token_ids) for name in OURS}
        assert len(ours) == 1  # exact with any drafts; sampled too, because draws belong to positions
        if not one.temperature:
            assert one.runs["transformers"].token_ids in map(list, ours)
        assert one.harness_seconds > 0
    texts = {tuple(one.runs["edd"].token_ids) for one in measured if one.temperature and one.repeat == 0}
    assert len(texts) == 4  # each prompt has draws of its own
    by_place: dict[tuple, list] = {}
    for one in measured:
        texts = by_place.setdefault((one.temperature, one.task, one.prompt, one.turn), [])
        texts.append([run.token_ids for _, run in sorted(one.runs.items())])
    assert all(len(texts) == 2 and texts[0] == texts[1] for texts in by_place.values())  # repeats, all alike

    # the rows follow from the raw file
    assert summary["rows"] == json.loads(json.dumps(make_rows(measured, names)))
    whole = [row for row in summary["rows"] if row["context"] is None]
    assert len(whole) == 2 * 4 * len(names)
    everything = [row for row in whole if row["task"] == "all" and row["temperature"] == 1.0]
    assert [row["prompts"] for row in everything] == [4] * len(names)
    by_method = {row["method"]: row for row in everything}
    assert all(by_method[name]["identical"] == 1 for name in OURS)
    assert by_method["transformers"]["identical"] is None
    assert by_method["edd"]["acceptance_by_depth"] and by_method["edd"]["speedup_transformers"] > 0
    by_length = [row for row in summary["rows"] if row["context"] and row["method"] == "edd"]
    assert sum(row["prompts"] for row in by_length) == 2 * 4
    assert 0 < summary["harness"]["share"] < 1

    for part in ("chats, greedy: 2 answers, 2 repeats", "bench/b, temperature 1", "all, greedy"):
        assert part in printed
    flags = [f": {flag}" for row in summary["rows"] for flag in row["flags"]]  # they stay on one line
    tables = [line for line in printed.split("\n") if not line.endswith(tuple(flags))]
    assert len(tables) > 20 and all(len(line) <= 80 for line in tables)

    # again: nothing is decoded any more
    before = (out / "measurements.jsonl").read_bytes()
    again = benchmark(config, out)
    assert (out / "measurements.jsonl").read_bytes() == before and again["rows"] == summary["rows"]


def test_drafters_that_read_different_blocks_do_not_disturb_each_other(config, tmp_path):
    once = {"tasks": config.tasks[:1], "repeats": 1}
    together = dataclasses.replace(config, methods=config.methods[:2], **once)
    rows = {row["method"]: row for row in _whole(benchmark(together, tmp_path / "both"))}
    counts = ("accept_len", "steps", "verify_tokens", "acceptance_by_depth", "new_tokens")
    both = raw(tmp_path / "both")
    for spec in together.methods:
        alone = dataclasses.replace(together, methods=[spec])
        [row] = [r for r in _whole(benchmark(alone, tmp_path / spec.name)) if r["method"] == spec.name]
        assert [row[key] for key in counts] == [rows[spec.name][key] for key in counts]
        for one, two in zip(raw(tmp_path / spec.name), both, strict=True):
            assert one.runs[spec.name].token_ids == two.runs[spec.name].token_ids
            assert one.runs[spec.name].stats.granted == two.runs[spec.name].stats.granted
    # the drafters differ at all
    assert rows["edd"]["verify_tokens"] != rows["other"]["verify_tokens"]


def _whole(summary) -> list[dict]:
    place = ("all", 0.0, None)
    return [r for r in summary["rows"] if (r["task"], r["temperature"], r["context"]) == place]


def test_an_interrupted_benchmark_continues(small, tmp_path, monkeypatch):
    whole = dataclasses.replace(small, limit=3)
    add, left = module.MeasurementLog.add, [3]

    def interrupted(self, measurement):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        add(self, measurement)

    with monkeypatch.context() as patch:
        patch.setattr(module.MeasurementLog, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            benchmark(whole, tmp_path)
    kept = (tmp_path / "measurements.jsonl").read_bytes()
    assert len(raw(tmp_path)) == 3 and not (tmp_path / "benchmark.json").exists()
    benchmark(whole, tmp_path)
    assert len(raw(tmp_path)) == 6 and (tmp_path / "measurements.jsonl").read_bytes().startswith(kept)


def test_more_of_the_same_continues_and_other_things_are_refused(small, tmp_path):
    benchmark(small, tmp_path)
    kept = (tmp_path / "measurements.jsonl").read_bytes()
    more = dataclasses.replace(small, repeats=2, temperatures=[0.0, 0.5])
    summary = benchmark(more, tmp_path)
    assert (tmp_path / "measurements.jsonl").read_bytes().startswith(kept)
    assert {row["repeats"] for row in summary["rows"]} == {2}
    for changes in (
        {"methods": small.methods[:1]},
        {"max_new_tokens": 4},
        {"seed": 1},
        {"tasks": more.tasks},
    ):
        if changes.get("tasks"):
            source = write_jsonl(tmp_path / "changed.jsonl", [{"prompt": "Other?"}])
            changes = {"tasks": [TaskSpec("chats", str(source))]}
        with pytest.raises(UserError, match="holds measurements of other things"):
            benchmark(dataclasses.replace(small, **changes), tmp_path)
    assert len(raw(tmp_path)) == 2 * 2 * 2


def test_too_long_prompts_end_it_or_are_counted(small, tmp_path):
    rows = [
        {"id": "fits", "turns": ["One?", "so long " * 300]},
        {"id": "long", "turns": ["very long " * 300, "And then?"]},
    ]
    tasks = [TaskSpec("long", str(write_jsonl(tmp_path / "long.jsonl", rows)))]
    config = dataclasses.replace(small, tasks=tasks, limit=None, repeats=2)
    with pytest.raises(UserError, match="long: prompt fits: .* must fit into the 512 positions") as error:
        benchmark(config, tmp_path / "a")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "a" / "measurements.jsonl").exists()  # before anything is decoded
    summary = benchmark(dataclasses.replace(config, skip_long=True), tmp_path / "b")
    assert summary["tasks"]["long"]["too_long"] == 3  # what follows a long turn is left out too
    assert [(one.prompt, one.turn, one.repeat) for one in raw(tmp_path / "b")] == [
        ("fits", 0, 0),
        ("fits", 0, 1),
    ]
    rows = write_jsonl(tmp_path / "all.jsonl", rows[1:])
    config = dataclasses.replace(config, tasks=[TaskSpec("long", str(rows))], skip_long=True)
    with pytest.raises(UserError, match="no prompt fits"):
        benchmark(config, tmp_path / "c")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"repeats": 0}, "repeats: must be >= 1, got 0"),
        ({"limit": 0}, "limit: must be >= 1, got 0"),
        ({"tasks": []}, "--task: must name at least one, got none"),
        (
            {"tasks": [TaskSpec("a", "x"), TaskSpec("a", "y")]},
            "--task: each name must be given once, got a twice",
        ),
        (
            {"methods": [MethodSpec("lookahead")] * 2},
            "--method: each name must be given once, got lookahead twice",
        ),
        ({"temperatures": [1.0, 1.0]}, "--temperature: must be given once each"),
        ({"temperatures": [-1.0]}, "temperature: must be >= 0 and finite, got -1"),
        ({"tasks": [TaskSpec("a", "nowhere.jsonl")]}, "nowhere.jsonl: no such file"),
    ],
)
def test_unusable_settings_are_refused_before_anything_is_loaded(config, changes, message, tmp_path):
    config = dataclasses.replace(config, target="/no/such/target", **changes)
    with pytest.raises(UserError, match=message) as error:
        benchmark(config, tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["all", "=x", "x=", "all=x", "a/b=x", "hub:gsm8k"])
def test_tasks_are_spelled_name_and_source(text):
    assert TaskSpec.parse("a = b=c") == TaskSpec("a", "b=c")
    assert TaskSpec.parse(" absent.jsonl.gz") == TaskSpec("absent", "absent.jsonl.gz")
    with pytest.raises(UserError, match=r"--task: must be \[NAME=\]FILE"):
        TaskSpec.parse(text)


@pytest.mark.parametrize(
    "tokens, expected",
    [
        (1, "0-255"),
        (255, "0-255"),
        (256, "256-511"),
        (511, "256-511"),
        (512, "512-1023"),
        (5000, "4096-8191"),
    ],
)
def test_ranges_of_context(tokens, expected):
    low, high = map(int, context_range(tokens).split("-"))
    assert context_range(tokens) == expected and low <= tokens <= high


def test_a_limit_is_for_each_group():
    prompts = [Prompt(str(i), ["?"], group="ab"[i % 2]) for i in range(10)]
    parts = limited(Task("t", prompts, 2), 2)
    assert [(p.name, [one.id for one in p.prompts]) for p in parts] == [
        ("t/a", ["0", "4"]),
        ("t/b", ["1", "5"]),
    ]
    [whole] = limited(Task("t", [Prompt("0", ["?"], group="a"), Prompt("1", ["?"], group="a")], 2), None)
    assert whole.name == "t" and len(whole.prompts) == 2


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 9])
def test_a_limit_means_the_same_everywhere(limit, questions):
    """A recipe's `limit`, and `--limit` of every command: evenly spaced."""
    (part,) = limited(Task("a", read_prompts(questions)), limit)
    assert part.prompts == read_prompts(questions, limit)
    assert part.prompts == Task.read(PromptSet("a", questions, limit)).prompts
    if limit == 2:
        assert [prompt.id for prompt in part.prompts] == ["81", "83"]
