"""The page against numbers counted slowly from the same raw files; what is missing, damaged or hostile."""

import gzip
import html
import io
import json
import math
import re
import shutil
import statistics
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from drafttrain.evaluation.measure import MeasurementLog
from drafttrain.evaluation.metrics import Measurement, MethodRun
from drafttrain.inference.stats import DecodeStats
from drafttrain.report.build import write_report
from drafttrain.report.bundles import costs
from drafttrain.report.measured import PARTS
from drafttrain.report.panels import FEW, Bar, Bars, Chart, Series
from drafttrain.report.pictures import draw_calibration, draw_classifier, sheet, to_png, write_sweep
from drafttrain.report.raw import read_benchmark, read_bundle, read_points
from drafttrain.report.svg import draw, drawn, ticks
from drafttrain.report.trace import Iteration, Trace
from drafttrain.report.traced import draw_tree
from drafttrain.run.cli import main
from drafttrain.utils.errors import UserError

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "model_cards/smollm2-135m-edd"
C2T = ROOT / "docs/results/raw/c2t"
EVIL = "<script>alert(1)</script>"
METHODS = {"autoregressive": 2.0, "transformers": 3.0, EVIL: 1.0, "slow": 2.5}  # seconds, more or less


def stats(prompt: int, name: str) -> DecodeStats:
    if name == "autoregressive":
        return DecodeStats(prompts=1, new_tokens=21, steps=20, seconds=2.0)
    accepted = 5 + prompt
    return DecodeStats(
        prompts=1, new_tokens=21, steps=20 - accepted, verify_tokens=40 + prompt, tree_depths=30,
        offered=[20 - accepted, 8], granted=[accepted - 2, 2], seconds=1.0,
    )  # fmt: skip


def measurements(task: str, turns: int = 3, repeats: int = 2, methods=METHODS) -> list[Measurement]:
    """Times that differ by turn and repeat in another way for each method."""
    found = []
    for repeat in range(repeats):
        for prompt in range(turns):
            runs = {
                name: MethodRun(
                    seconds * (1 + 0.1 * prompt + 0.03 * repeat * i + len(task) / 50),
                    list(range(21)),
                    None if name == "transformers" else stats(prompt, name),
                )
                for i, (name, seconds) in enumerate(methods.items())
            }
            found.append(Measurement(task, f"p{prompt}", 0, repeat, 50, runs, 0.0))
    return found


@pytest.fixture
def folder(tmp_path) -> Path:
    """A benchmark's folder with two tasks and tuning prompts."""
    log = MeasurementLog(tmp_path / "bench" / "measurements.jsonl", "key")
    for task in ("(tuning)", "chat", "code & <math>"):
        for measurement in measurements(task):
            log.add(measurement)
    return tmp_path / "bench"


def raw_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "measurements.jsonl").read_text().splitlines()[1:]]


def total(rows: list[dict], task: str, method: str) -> float:
    """Sum over turns of the median over repeats, from the file."""
    turns: dict = {}
    for row in rows:
        if row["task"] == task:
            turns.setdefault((row["prompt"], row["turn"]), []).append(row["runs"][method]["seconds"])
    return sum(statistics.median(seconds) for seconds in turns.values())


def page(folder: Path, **options) -> str:
    return write_report(folder, folder / "out" / "report.html", **options).read_text(encoding="utf-8")


def drawings(text: str, section: str) -> dict[str, ElementTree.Element]:
    """The figures of a section by title."""
    part = text[text.index(f'<section id="{section}">') :]
    part = part[: part.index("</section>")]
    found = (
        ElementTree.fromstring(svg)
        for svg in re.findall(r'<svg viewBox[^>]* role="img".*?</svg>', part, re.S)
    )
    return {svg.find("title").text: svg for svg in found}


def notes(svg: ElementTree.Element) -> list[str]:
    return [group.find("title").text for group in svg.iter("g") if group.find("title") is not None]


def test_bars_are_ratios_of_total_times(folder):
    rows, text = raw_rows(folder), page(folder)
    figures = drawings(text, "speed")
    assert list(figures) == ["chat: 3 answers, 2 repeats", "code & <math>: 3 answers, 2 repeats"]
    for task, svg in zip(("chat", "code & <math>"), figures.values()):
        [one] = [line for line in svg.iter("line") if line.get("class") == "reference"]
        groups = {group.find("text").text: group for group in svg.iter("g")}
        assert list(groups) == [EVIL, "slow", "transformers"]  # the fastest first, baselines last
        for method, group in groups.items():
            expected = total(rows, task, "autoregressive") / total(rows, task, method)
            rect = group.find("rect")
            start = float(rect.get("x"))
            assert float(rect.get("width")) / (float(one.get("x1")) - start) == pytest.approx(
                expected, abs=2e-3
            )
            assert group.findall("text")[1].text.startswith(f"{expected:.2f}× (")
        kinds = [group.find("rect").get("class") for group in groups.values()]
        assert kinds == ["bar best", "bar bad", "bar baseline"]
        assert "⚑" in groups["slow"].findall("text")[1].text
    assert "slower than autoregressive decoding" in text and "(tuning)" not in text


def test_acceptance_is_counted_in_the_first_repeat(folder):
    rows = [row for row in raw_rows(folder) if row["task"] == "chat" and row["repeat"] == 0]
    figures = drawings(page(folder), "acceptance")
    found = [row["runs"][EVIL]["stats"] for row in rows]
    granted = [sum(s["granted"][d] for s in found) for d in range(2)]
    offered = [sum(s["offered"][d] for s in found) for d in range(2)]
    steps = sum(s["steps"] for s in found)
    assert f"{EVIL}, depth 2: {granted[1]} of {offered[1]} accepted" in notes(figures["chat: by depth"])
    assert f"{EVIL}, position 1: {granted[0]} of {steps} steps" in notes(figures["chat: by position"])
    expected = [206 - 182 * granted[d] / offered[d] for d in range(2)]  # the frame is 182 high
    circles = [c for c in figures["chat: by depth"].iter("circle")]
    assert [float(c.get("cy")) for c in circles] == pytest.approx(expected, abs=0.01)
    assert [c.get("class") for c in circles] == ["marker", "marker"]
    sure = stats(0, EVIL)
    assert sum(sure.granted) == sure.new_tokens - sure.prompts - sure.steps  # the sample holds together


def test_verified_tokens_against_accept_len(folder, tmp_path):
    rows = [row for row in raw_rows(folder) if row["task"] == "chat" and row["repeat"] == 0]
    found = [row["runs"][EVIL]["stats"] for row in rows]
    steps = sum(s["steps"] for s in found)
    verified, emitted = (sum(s[name] for s in found) for name in ("verify_tokens", "new_tokens"))
    text = page(folder, sweeps=[C2T / "points_mt_bench.jsonl"])
    figures = drawings(text, "verified")
    expected = f"{EVIL}: {verified / steps:.2f} verified per step, accept_len {(emitted - 3) / steps:.3f}"
    assert expected in notes(figures["chat"])
    points = [json.loads(line) for line in (C2T / "points_mt_bench.jsonl").read_text().splitlines()]
    assert len(notes(figures["sweep mt_bench"])) == len(points)
    some = points[3]
    assert any(
        note.startswith(f"{some['tree']}: {some['verify_per_step']:.2f} verified per step")
        for note in notes(figures["sweep mt_bench"])
    )


def test_sweeps_and_bundles_of_the_same_name_are_told_apart(folder, tmp_path):
    tokens, places = {}, []
    for run, factor in (("a", 1), ("b", 3)):
        bundle, sweep = tmp_path / run / "bundle", tmp_path / run / "sweep"
        bundle.mkdir(parents=True)
        sweep.mkdir()
        shutil.copy(BUNDLE / "calibration.json", bundle)
        evaluation = json.loads((BUNDLE / "eval.json").read_text())
        row = evaluation["tasks"]["all"]
        row["verify_tokens"] *= factor
        tokens[str(bundle)] = 1 + row["verify_tokens"] / row["steps"]
        (bundle / "eval.json").write_text(json.dumps(evaluation))
        shutil.copy(C2T / "points_gsm8k.jsonl", sweep / "points.jsonl")
        places.append(sweep)
    text = page(folder, bundles=list(tokens), sweeps=[places[0], places[1] / "points.jsonl"])
    for bundle, mean in tokens.items():
        [mark] = drawings(text, "costs")[f"{bundle}: the target's forward"].iterfind("text[@class='mark']")
        assert mark.text.startswith(f"{mean:.1f} tokens, ")
    figures = drawings(text, "verified")
    assert all(f"sweep {place}/points.jsonl" in figures for place in places)
    footer = text[text.index("<footer>") :]
    assert footer.count("sweep/points.jsonl") == 2 and footer.count("bundle/eval.json") == 2
    text = page(folder, bundles=list(tokens)[:1], sweeps=places[:1])
    assert "bundle: the target's forward" in drawings(text, "costs")
    assert "sweep sweep" in drawings(text, "verified")


def test_calibration_and_training(folder):
    text = page(folder, bundles=[BUNDLE, C2T])
    calibration = json.loads((BUNDLE / "calibration.json").read_text())
    name = "smollm2-135m-edd"
    [drafter, by_depth, classifier, recall] = drawings(text, "reliability").values()
    bins = calibration["confidence"]["raw"]["all"]["bins"]
    for (n, mean, share), note in zip(bins, notes(drafter)):
        assert note.endswith(f": {n} tokens, confidence {mean:.3f}, accepted {share:.3f}")
    assert sum("C2T" in note for note in notes(classifier)) == 10
    for kind, label in (("raw", "1"), ("scaled", f"{calibration['temperature']:g}")):
        errors = {d: row["ece"] for d, row in calibration["confidence"][kind].items() if d != "all"}
        expected = [f"ECE at temperature {label}, depth {d}: {ece:.3f}" for d, ece in errors.items()]
        assert expected and set(expected) <= set(notes(by_depth))
    curve = json.loads((C2T / "classifier_report.json").read_text())["curves"]["C2T"]
    line = next(path for path in recall.iter("path") if path.get("class") == "line").get("d")
    places = [tuple(map(float, place.split())) for place in line[1:].split("L")]
    assert len(places) == len(curve["theta"])
    assert [y for _, y in places] == pytest.approx([206 - 182 * r for r in curve["recall"]], abs=0.06)
    expected = [42 + 308 * (1 + math.log10(theta) / 4) for theta in curve["theta"]]  # from 0.0001 on
    assert [x for x, _ in places] == pytest.approx(expected, abs=0.06)
    below = [t.text for t in recall.iter("text") if t.get("y") == "220"]
    assert below == ["0.0001", "0.001", "0.01", "0.1", "1"]

    evaluation = json.loads((BUNDLE / "eval.json").read_text())
    tokens = 1 + evaluation["tasks"]["all"]["verify_tokens"] / evaluation["tasks"]["all"]["steps"]
    forward = drawings(text, "costs")[f"{name}: the target's forward"]
    [mark] = [line for line in forward.iter("line") if line.get("class") == "reference"]
    sizes = calibration["target"][0]["sizes"]
    at = 42 + (360 - 10 - 42) * math.log2(tokens) / math.log2(sizes[-1])
    assert float(mark.get("x1")) == pytest.approx(at, abs=0.01)
    words = f"{evaluation['tree']}: {tokens:.1f} tokens per step on average"
    assert words in text.replace("<wbr>", "")
    curve = calibration["target"][1]
    expected = f"{curve['context']} tokens of context, {sizes[4]}: {1000 * curve['median'][4]:.2f} ms"
    assert expected in notes(forward)

    log = json.loads((BUNDLE / "training_log.json").read_text())
    figures = drawings(text, "training")
    lengths = [entry["eval_accept_len"] for entry in log if "eval_accept_len" in entry]
    found = [
        note for note in notes(figures[f"{name}: accept_len"]) if note.startswith("accept_len (held-out) ")
    ]
    assert [note.split()[2] for note in found] == [f"{length:.3f}" for length in lengths]
    losses = [entry for entry in log if "loss" in entry]
    assert sum("(training)" in note for note in notes(figures[f"{name}: loss"])) == len(losses)


def test_errors_at_temperature_1_are_drawn_raw_and_scaled(folder):
    """Those scaled are of temperatures that fit each half of the drafts, so they differ."""
    qwen = BUNDLE.parent / "qwen2.5-coder-0.5b-edd-anchored"
    confidence = json.loads((qwen / "calibration.json").read_text())["confidence"]
    by_depth = list(drawings(page(folder, bundles=[qwen]), "reliability").values())[1]
    for kind, label in (("raw", "1"), ("scaled", "1, scaled")):
        errors = {d: row["ece"] for d, row in confidence[kind].items() if d != "all"}
        expected = {f"ECE at temperature {label}, depth {d}: {ece:.3f}" for d, ece in errors.items()}
        assert expected and expected <= set(notes(by_depth))
    few = sum(row["tokens"] < FEW for d, row in confidence["raw"].items() if d != "all")
    hollow = [one for one in by_depth.iter() if "open" in (one.get("class") or "").split()]
    assert few and len(hollow) >= 3 * few  # a point of each line


def test_contexts_of_several_bundles_have_one_legend(folder):
    bundles = [read_bundle(BUNDLE), read_bundle(BUNDLE.parent / "qwen2.5-coder-0.5b-edd-anchored")]
    for order in (bundles, bundles[::-1]):
        section = costs(order, {})
        styles = {name: style for name, style, _ in section.legend}
        assert list(styles) == [f"{context} tokens of context" for context in (64, 256, 512)]
        for series in (series for panel in section.panels for series in panel.series):
            assert styles[series.name] == series.style


def test_operating_points_beyond_what_was_timed_are_in_the_frame(folder, tmp_path):
    shutil.copy(BUNDLE / "calibration.json", tmp_path)
    evaluation = {"format_version": 2, "tree": "huge", "tasks": {"all": {"steps": 10, "verify_tokens": 3000}}}
    (tmp_path / "eval.json").write_text(json.dumps(evaluation))
    text = page(folder, bundles=[tmp_path])
    forward = drawings(text, "costs")[f"{tmp_path.name}: the target's forward"]
    [mark] = [line for line in forward.iter("line") if line.get("class") == "reference"]
    assert float(mark.get("x1")) == 350  # the frame's right end
    assert "huge: 301.0 tokens per step on average, which take" in text
    assert "by extrapolation from 128" in text and "extrapolation" not in page(folder, bundles=[BUNDLE])


def test_losses_that_are_no_numbers_are_counted_and_not_drawn(folder, tmp_path):
    losses = [3.0, math.nan, 2.0, math.inf, None, "x", 1.0]
    log = [{"step": i, "loss": loss, "elapsed": None} for i, loss in enumerate(losses)]
    for name, entries in (("a", [*log, {"step": 9, "eval_accept_len": 1.5}]), ("b", log)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "training_log.json").write_text(json.dumps(entries))
    text = page(folder, bundles=[tmp_path / "a", tmp_path / "b"])
    figures = drawings(text, "training")
    assert [note.split(" at ")[0] for note in notes(figures["b: loss"])] == [
        "loss (training) 3.000", "loss (training) 2.000", "loss (training) 1.000"
    ]  # fmt: skip
    assert text.count("4 values of the training log are no numbers") == 2
    section = text[text.index('<section id="training">') :]
    legend = re.search(r'<ul class="legend">(.*?)</ul>', section)[1]
    assert re.findall(r"<span>(.*?)</span>", legend) == ["loss (training)", "accept_len (held-out)"]


def test_values_are_below_labels_that_are_long():
    label, flags = "eagle2:top_k=10,max_depth=6,total=50", [1, 2]
    bars = [Bar("short", 1.5, "1.50× (1.40–1.60)", flags=flags), Bar(label, 1.5, "1.50× (1.40–1.60)")]
    svg = ElementTree.fromstring(str(draw(Bars("", bars, "speedup"), 0)))
    (short, beside), (long, below) = (group.findall("text") for group in svg.iter("g"))
    assert float(short.get("y")) == float(beside.get("y"))
    assert float(long.get("y")) + 14 == float(below.get("y"))
    rects = [float(rect.get("y")) for rect in svg.iter("rect")]
    assert float(below.get("y")) < rects[1] and rects[0] < float(long.get("y"))


def a_trace() -> Trace:
    first = Iteration([], [], [], [], [], [], [3], ["<b>One"], 0)
    tokens, parents, depths = [3, 4, 5, 6], [-1, 0, 0, 2], [0, 1, 1, 2]
    texts, log_probs = ["<b>One", " two", "\n", "</svg>"], [0.0, -1.0, -0.5, -0.1]
    step = Iteration(
        tokens, parents, depths, texts, log_probs, [0, 2, 3], [5, 6, 7], ["\n", "</svg>", " &end"], 2
    )
    return Trace(
        "target", "chain", "float32", '</blockquote><img src=x onerror="x()">', 9, 8, "length", [first, step]
    )


def test_trace_is_drawn_and_everything_is_escaped(folder, tmp_path):
    a_trace().save(tmp_path / "trace.json")
    text = page(folder, trace=tmp_path / "trace.json")
    assert "<script" not in text and "<img" not in text and "<b>" not in text
    assert html.escape('</blockquote><img src=x onerror="x()">') in text.replace("&#34;", "&quot;")
    answer = re.search(r'<div class="answer">(.*?)</div>', text, re.S)[1]
    assert html.unescape(re.sub(r"</?(span|u)[^>]*>", "", answer)) == "<b>One\n</svg> &end"
    assert re.findall(r"<u>(.*?)</u>", answer) == ["&lt;b&gt;One", " &amp;end"]  # the target's own tokens
    assert re.findall(r'class="i(\d)" title="(.*?)"', answer) == [
        ("0", "iteration 0: 1 token, 0 drafted"),
        ("1", "iteration 1: 3 tokens, 2 drafted"),
    ]
    tree = next(iter(drawings(text, "tree").values()))
    boxes = [(g.get("class"), g.findall("text")[0].text) for g in tree.iter("g")]
    assert boxes == [
        ("node root", "<b>One"),
        ("node refused", "␣two"),
        ("node accepted", "✓ ⏎"),
        ("node accepted", "✓ </svg>"),
        ("node own", "+ ␣&end"),
    ]
    assert [g.findall("text")[1].text for g in list(tree.iter("g"))[1:4]] == ["37%", "61%", "90%"]


class Attributes(HTMLParser):
    """All tags of a page, and the values of their attributes by name."""

    def __init__(self):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, list[str]] = {}

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value)


def test_nothing_is_fetched_and_nothing_runs(folder, tmp_path):
    a_trace().save(tmp_path / "trace.json")
    text = page(folder, bundles=[BUNDLE], sweeps=[C2T / "points_gsm8k.jsonl"], trace=tmp_path / "trace.json")
    assert "@import" not in text and "@font-face" not in text
    assert set(re.findall(r"url\((.*?)\)", text)) == {"#hatch"}
    parser = Attributes()
    parser.feed(text)
    assert not parser.tags & {"script", "link", "iframe", "object", "img", "image", "use"}
    assert not parser.attributes.keys() & {
        "src",
        "srcset",
        "data",
        "action",
        "onload",
        "onclick",
        "xlink:href",
    }
    assert all(target.startswith("#") for target in parser.attributes["href"])
    assert parser.attributes["content"][-1] == "default-src 'none'; style-src 'unsafe-inline'"
    ids = re.findall(r' id="(.*?)"', text)
    assert len(ids) == len(set(ids))
    assert all(svg.find("desc").text for svg in drawings(text, "speed").values())


def test_same_files_give_the_same_page(folder):
    assert page(folder, bundles=[BUNDLE]) == page(folder, bundles=[BUNDLE])


def test_missing_sections_say_what_makes_them(folder):
    text = page(folder)
    lines = re.findall(r'<p class="missing">(.*?)</p>', text)
    commands = ["benchmark", "calibrate", "calibrate", "train", "report", "report"]
    assert [re.search(r"<code>drafttrain ([\w-]+)", line)[1] for line in lines] == commands
    assert "drafttrain benchmark --table sweep" in text  # more points for the scatter


def test_headline(folder):
    text = page(folder)
    rows = raw_rows(folder)
    both = [sum(total(rows, task, m) for task in ("chat", "code & <math>")) for m in ("autoregressive", EVIL)]
    assert f"<dt>speedup</dt><dd>{both[0] / both[1]:.2f}×" in text and "the fastest of 2 methods" in text
    assert "not recorded" in text
    machine = {"processor": "Some CPU", "cores": 4, "threads": 3, "device": "cpu"}
    settings = {"format_version": 2, "tree": "slow", "dtype": "bfloat16", "machine": machine, "target": "a/b"}
    settings["lossless"] = {"prompts": 8, "mismatches": 1}
    (folder / "summary.json").write_text(json.dumps(settings))
    text = page(folder)
    both = [
        sum(total(rows, task, m) for task in ("chat", "code & <math>")) for m in ("autoregressive", "slow")
    ]
    assert f"<dt>speedup</dt><dd>{both[0] / both[1]:.2f}×" in text and "chosen on tuning prompts" in text
    assert "⚑ slower than autoregressive decoding." in text
    for part in ("Some CPU", "3 threads of 4 cores", "bfloat16", "7 of 8", "<h1>b: bench</h1>"):
        assert part in text


def written(folder: Path, found: list[Measurement]) -> Path:
    log = MeasurementLog(folder / "measurements.jsonl", "key")
    for measurement in found:
        log.add(measurement)
    return folder


def test_headline_of_sampled_texts(tmp_path):
    lengths = {"autoregressive": 20, "long": 40, "short": 10}  # tokens
    found = []
    for temperature, rates in ((1.0, (10, 60, 50)), (0.5, (10, 30, 20))):  # tokens per second
        for one in measurements("chat", repeats=2, methods=dict.fromkeys(lengths, 1.0)):
            for (method, length), rate in zip(lengths.items(), rates):
                run = one.runs[method]
                run.token_ids, run.seconds = list(range(length)), length / rate
            one.temperature = temperature
            found.append(one)
    text = page(written(tmp_path / "warm", found))
    # the lowest temperature alone, and the fastest by token: "short" takes the least time
    assert "<dt>speedup</dt><dd>3.00×<small>95 % interval 3.00 to 3.00<" in text
    assert "These numbers are of long, the fastest of 2 methods" in text
    assert "over 3 answers of chat, temperature 0.5." in text
    for svg, speedup in zip(drawings(text, "speed").values(), (6, 3)):
        groups = [group.findall("text") for group in svg.iter("g")]
        assert [label.text for label, _ in groups] == ["long", "short"]
        assert groups[0][1].text.startswith(f"{speedup}.00× ({speedup}.00–{speedup}.00)")


def test_headline_after_another_tree_was_chosen(tmp_path):
    base = {"autoregressive": 2.0, "transformers": 3.0}
    found = []
    for tree in ("old", "new"):
        for task in ("chat", "code"):
            found += measurements(task, methods={**base, tree: 0.5 if tree == "old" else 1.0})
    folder = written(tmp_path / "evaluation", found)
    (folder / "summary.json").write_text('{"format_version": 2, "tree": "new"}')
    words = "These numbers are of new, the {}, over 6 answers of chat, code."
    assert words.format("method that was chosen on tuning prompts") in page(folder)
    (folder / "summary.json").write_text('{"format_version": 2, "tree": "new", "tuning": []}')
    assert words.format("only drafting method here") in page(folder)  # a single tree is not tuned
    (folder / "summary.json").unlink()
    assert words.format("only drafting method here") in page(folder)  # the newest


def test_headline_where_one_task_has_no_drafting(tmp_path):
    found = measurements("chat", methods={"autoregressive": 2.0, "fast": 0.5})
    found += measurements("code", repeats=2, methods={"autoregressive": 2.0})
    folder = written(tmp_path / "evaluation", found)
    assert "These numbers are of fast, the only drafting method here, over 3 answers of chat." in page(folder)


def test_settings_of_a_benchmark(folder):
    target = {"name": "some/model", "dtype": "float32", "fingerprint": "x"}
    settings = {
        "format_version": 1,
        "target": target,
        "settings": {"max_new_tokens": 77},
        "machine": {"gpu": "G1"},
    }
    (folder / "benchmark.json").write_text(json.dumps({**settings, "measured": "2026-01-02T03:04"}))
    text = page(folder)
    for part in ("<h1>model: bench</h1>", "float32, at most 77 new tokens, measured 2026-01-02", ">G1<"):
        assert part in text


@pytest.mark.parametrize(
    "odd", [{"settings": []}, {"lossless": {"prompts": "a", "mismatches": 1}}, {"machine": 3}, {"target": 1}]
)
def test_odd_settings_do_no_harm(folder, odd):
    (folder / "benchmark.json").write_text(json.dumps({"format_version": 1, **odd}))
    assert "not recorded" in page(folder)


def test_every_number_is_in_a_table(folder):
    text = page(folder)
    table = re.search(r"<summary>chat.*?<tbody>(.*?)</tbody>", text, re.S)[1]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in table.split("</tr>")[:-1]]
    assert [row[0] for row in rows] == [html.escape(EVIL), "slow", "autoregressive", "transformers"]
    seconds = total(raw_rows(folder), "chat", "transformers")
    assert rows[3][1] == f"{63 / seconds:.1f}" and rows[3][4] == "–"  # it has no accept_len


def test_nothing_drafted(tmp_path):
    log = MeasurementLog(tmp_path / "measurements.jsonl", "key")
    for measurement in measurements("chat", methods={"autoregressive": 2.0, "transformers": 3.0}):
        log.add(measurement)
    text = page(tmp_path)
    assert "<dt>speedup</dt>" not in text and text.count('class="missing"') == 8
    assert len(drawings(text, "speed")) == 1  # transformers against plain decoding


def test_temperatures_and_methods_have_tables_of_their_own(folder):
    path = folder / "measurements.jsonl"
    warm = [{**m.to_json(), "temperature": 0.7} for m in measurements("chat")]
    alone = [m.to_json() for m in measurements("chat", methods={"lookup": 1.0})]
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in warm + alone)
    text = page(folder)
    titles = re.findall(r"<summary>(.*?)</summary>", text)
    assert [title.partition(": ")[0] for title in titles][:4] == [
        "chat", "code &amp; &lt;math&gt;", "chat, temperature 0.7", "chat"
    ]  # fmt: skip
    assert "chat: autoregressive decoding was not measured with these methods" in text
    assert len(drawings(text, "speed")) == 3


def test_interrupted_measurements(folder):
    path = folder / "measurements.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    chat = [line for line in whole if '"task": "chat"' in line]
    path.write_text("".join([whole[0], *chat[:4]]) + chat[4][:50])  # the second repeat ends after one turn
    found = read_benchmark(folder)
    [group] = found.groups
    assert [(m.prompt, m.repeat) for m in group.measurements] == [("p0", 0), ("p1", 0), ("p2", 0)]
    assert found.unfinished == 2 and "as many repeats: 2 measurements." in page(folder)
    path.write_text("".join([whole[0], *chat[:5]]))
    assert [(m.prompt, m.repeat) for m in read_benchmark(folder).groups[0].measurements] == [
        ("p0", 0), ("p1", 0), ("p0", 1), ("p1", 1)
    ]  # fmt: skip


def test_the_file_of_a_folder_has_the_folders_settings(folder):
    (folder / "benchmark.json").write_text(json.dumps({"format_version": 1, "dtype": "bfloat16"}))
    found = [read_benchmark(place).settings["dtype"] for place in (folder, folder / "measurements.jsonl")]
    assert found == ["bfloat16"] * 2


def test_a_turn_without_its_first_repeat_is_left_out(folder):
    """Its damaged line was removed, and it is not measured again yet; tokens and counts are of repeat 0."""
    path = folder / "measurements.jsonl"
    kept = [m for m in raw_rows(folder) if (m["task"], m["prompt"], m["repeat"]) != ("chat", "p1", 0)]
    path.write_text("\n".join(map(json.dumps, [{"measured": "key"}, *kept])) + "\n")
    benchmark = read_benchmark(folder)
    [chat] = [group for group in benchmark.groups if group.task == "chat"]
    assert {m.prompt for m in chat.measurements} == {"p0", "p2"} and benchmark.unfinished == 1
    row = chat.rows["autoregressive"]
    assert row.prompts == 2 and row.repeats == 2 and row.speedup_interval == [1.0, 1.0]
    path.write_text(
        "\n".join(map(json.dumps, [{"measured": "key"}, *(m for m in kept if m["repeat"])])) + "\n"
    )
    with pytest.raises(UserError, match="holds no measurements of a benchmark"):
        read_benchmark(folder)


def test_compressed_and_single_files(folder):
    plain = page(folder)
    data = (folder / "measurements.jsonl").read_bytes()
    single = shutil.copy(folder / "measurements.jsonl", folder / "some_raw.jsonl")
    (folder / "measurements.jsonl").unlink()
    (folder / "measurements.jsonl.gz").write_bytes(gzip.compress(data))

    def tables(text: str) -> list[str]:
        return re.findall(r"<table>.*?</table>", text, re.S)

    assert tables(page(folder)) == tables(plain)
    text = write_report(single, folder / "b.html").read_text()
    assert tables(text) == tables(plain) and "<h1>some_raw</h1>" in text
    (folder / "some_raw_summary.json").write_text('{"format_version": 2, "dtype": "float16"}')
    assert "float16" in write_report(single, folder / "b.html").read_text()


def doubled(folder: Path) -> None:
    """Append the first measurement once more, as a second process would."""
    path = folder / "measurements.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[1]]))


def changed(folder: Path, **values) -> None:
    """Change the first measurement's first run."""
    path = folder / "measurements.jsonl"
    head, first, *rest = path.read_text().splitlines(keepends=True)
    measurement = json.loads(first)
    measurement["runs"]["autoregressive"] |= values
    path.write_text("".join([head, json.dumps(measurement) + "\n", *rest]))


def damaged(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    "break_it, expected",
    [
        (lambda f: shutil.rmtree(f), "no such folder"),
        (lambda f: (f / "measurements.jsonl").unlink(), "no measurements.jsonl there"),
        (lambda f: damaged(f, "measurements.jsonl", '{"a": 1}\n'), "line 1: damaged"),
        (lambda f: damaged(f, "measurements.jsonl", '{"measured": "x"}\n'), "holds no measurements"),
        (
            lambda f: damaged(f, "measurements.jsonl", '{"measured": "x"}\n{"task": 1}\n'),
            "line 2: damaged",
        ),
        (lambda f: damaged(f, "measurements.jsonl", '{"measured": "x"}\n{"ta\n'), "line 2: damaged"),
        (lambda f: changed(f, seconds="x"), "line 2: damaged (runs is of the wrong type"),
        (lambda f: changed(f, token_ids=None), "line 2: damaged (runs is of the wrong type"),
        (lambda f: changed(f, seconds=0.0), "line 2: damaged (a run without time or tokens)"),
        (lambda f: changed(f, token_ids=[]), "line 2: damaged (a run without time or tokens)"),
        (doubled, "measurements.jsonl: must have each measurement once, got two of"),
        (lambda f: damaged(f, "benchmark.json", "{}"), "not of format 1"),
        (lambda f: damaged(f, "summary.json", '{"format_version": 9}'), "not of format 2"),
        (lambda f: damaged(f, "summary.json", "{"), "cannot be read as JSON"),
    ],
)
def test_bad_measurements(folder, capsys, break_it, expected):
    break_it(folder)
    assert main(["report", str(folder), "--out", str(folder.parent / "x.html")]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
    assert not (folder.parent / "x.html").exists()


@pytest.mark.parametrize(
    "name, content, expected",
    [
        (None, "", "none of calibration.json"),
        ("calibration.json", "{}", "no calibration of format 1"),
        ("training_log.json", "{}", "no list of entries"),
        ("eval.json", '{"format_version": 1}', "not of format 2"),
        ("eval.json", '{"format_version": 2, "tree": "x", "tasks": {"all": {}}}', "eval.json: damaged"),
        ("eval.json", '{"format_version": 2, "tree": "x", "tasks": []}', "eval.json: damaged"),
        ("eval.json", '{"format_version": 2, "tasks": {"a": {"steps": 1, "verify_tokens": 2}}}', "damaged"),
        (
            "eval.json",
            '{"format_version": 2, "tree": "x", "tasks": {"a": {"steps": -1, "verify_tokens": 2}}}',
            "damaged",
        ),
        ("classifier_report.json", '{"rows": {"x": {}}}', "damaged"),
        ("classifier_report.json", "[", "cannot be read as JSON"),
    ],
)
def test_bad_bundles(folder, tmp_path, name, content, expected):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    if name:
        (bundle / name).write_text(content)
    with pytest.raises(UserError, match=expected):
        page(folder, bundles=[bundle])


POINT = {
    "tree": "a",
    **dict.fromkeys(("accept_len", "verify_per_step", "accept_len_nonrepeated"), 1.0),
    **dict.fromkeys(("repetition", "tokens_per_second"), 0.5),
    **dict.fromkeys(("verify_tokens", "steps", "new_tokens"), 1),
}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}\n",
        '{"tree": 1}\n',
        "x",
        *(json.dumps(POINT | odd) for odd in ({"tree": 5}, {"accept_len": "x"}, {"repetition": math.nan})),
    ],
)
def test_bad_sweeps(folder, tmp_path, content):
    (tmp_path / "points.jsonl").write_text(content)
    with pytest.raises(UserError, match="points.jsonl: damaged"):
        page(folder, sweeps=[tmp_path / "points.jsonl"])
    with pytest.raises(UserError, match="no such file; make it with drafttrain benchmark --table sweep"):
        page(folder, sweeps=[tmp_path / "nowhere.jsonl"])


def test_time_per_token_is_split(folder):
    """Over all tasks: the seconds of a turn are medians, the shares those of the loop's own clock."""
    rows = raw_rows(folder)
    for row in rows:
        for run in row["runs"].values():
            if run["stats"]:
                run["stats"] |= {"prefill_seconds": 0.1, "draft_seconds": 0.2, "verify_seconds": 0.5}
                run["peak_bytes"] = 2_500_000_000 + row["repeat"]
    write_rows(folder, rows)
    figures = drawings(page(folder), "time")
    assert list(figures) == ["all tasks: time per token"]
    groups = {group.find("text").text: group for group in figures["all tasks: time per token"].iter("g")}
    for method in METHODS:
        ms = 1000 * sum(total(rows, task, method) for task in ("chat", "code & <math>")) / (6 * 21)
        assert groups[method].findall("text")[1].text == f"{ms:.1f} ms"
    ours = groups[EVIL].findall("rect")  # of a second
    assert [rect.get("class") for rect in ours] == [f"bar {part}" for part in PARTS]
    widths = [float(rect.get("width")) for rect in ours]
    assert [width / sum(widths) for width in widths] == pytest.approx([0.1, 0.2, 0.5, 0.2], abs=0.01)
    assert [rect.get("class") for rect in groups["transformers"].iter("rect")] == ["bar baseline"]
    assert groups[EVIL].find("title").text == f"{EVIL}: prompt 10%, drafting 20%, verifying 50%, rest 20%"
    assert "<dt>peak memory</dt><dd>2.50 GB<" in page(folder)
    table = re.search(r'<section id="time">.*?<tbody>(.*?)</tbody>', page(folder), re.S)[1]
    first = re.findall(r"<td>(.*?)</td>", table.split("</tr>")[0])
    assert first[2:] == ["10%", "20%", "50%", "20%", "2.50"]


def test_speedup_by_length_of_context(folder):
    rows = raw_rows(folder)
    for row in rows:
        row["prompt_tokens"] = {"p0": 100, "p1": 300, "p2": 500}[row["prompt"]]
    write_rows(folder, rows)
    text = page(folder)
    [chart] = drawings(text, "context").values()
    tasks = ("chat", "code & <math>")

    def speedup(method: str, prompts: set[str]) -> float:
        part = [row for row in rows if row["prompt"] in prompts]
        base, own = (sum(total(part, task, name) for task in tasks) for name in ("autoregressive", method))
        return base / own

    for method in (EVIL, "slow"):
        for name, prompts in (("0-255", {"p0"}), ("256-511", {"p1", "p2"})):
            words = f"{method}, {name} tokens of context: speedup {speedup(method, prompts):.2f} ("
            assert any(note.startswith(words) for note in notes(chart)), words
    part = text[text.index('<section id="context">') :]
    heads = re.findall(r"<th scope=\"col\">(.*?)</th>", part[: part.index("</table>")])
    assert heads == ["method", "0-255 tokens: 2 answers", "256-511 tokens: 4 answers"]
    assert f"{speedup('transformers', {'p0'}):.2f} (" in part


def test_tasks_with_the_same_methods_are_joined(folder):
    path = folder / "measurements.jsonl"
    more = measurements("more", methods={**METHODS, "extra": 1.5})
    warm = [{**m.to_json(), "temperature": 0.7} for m in measurements("chat")]
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in [*(m.to_json() for m in more), *warm])
    titles = [title.partition(":")[0] for title in drawings(page(folder), "time")]
    assert titles == ["chat, code & <math>", "more", "chat, temperature 0.7"]


def test_conditions(folder):
    machine = {"processor": "Some CPU", "threads": 2, "kernel": "avx512", "load": 0.25}
    methods = {"transformers": {"dtype": "float32"}}
    settings = {"target": {"name": "t", "dtype": "bfloat16"}, "machine": machine, "methods": methods}
    (folder / "benchmark.json").write_text(json.dumps({"format_version": 1, **settings}))
    text = page(folder)
    assert "<dt>identical texts</dt><dd>100%<small>of 6 texts, to plain decoding" in text
    assert ">Some CPU<small>2 threads, 0.25 cores taken by other processes</small>" in text
    assert ">bfloat16<small>transformers in float32; kernels: avx512</small>" in text
    assert "<dt>peak memory</dt>" not in text  # not in these measurements


def write_rows(folder: Path, rows: list[dict]) -> None:
    path = folder / "measurements.jsonl"
    head = path.read_text().splitlines()[0]
    path.write_text("\n".join([head, *map(json.dumps, rows)]) + "\n")


def test_pictures(folder, tmp_path):
    a_trace().save(tmp_path / "trace.json")
    files = {
        "bundles": [BUNDLE, C2T],
        "sweeps": [C2T / "points_gsm8k.jsonl"],
        "trace": tmp_path / "trace.json",
    }
    for out in ("png", "again"):
        page(folder, **files, png=tmp_path / out)
    names = {"speed", "time", "acceptance", "verified", "reliability", "costs", "training", "text"}
    names |= {"tree_1", "tree_2"}
    assert {file.name for file in (tmp_path / "png").iterdir()} == {f"{name}.png" for name in names}
    for file in (tmp_path / "png").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
        with Image.open(file) as picture:
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20, file.name
            assert picture.getpixel((2, 2))[:3] == (255, 255, 255) and picture.width >= 800


def test_a_picture_is_the_drawing_of_the_page(folder):
    bars = [Bar("x", 1.5, "1.5×", "", "best", 1.2, 1.8, 2.0), Bar("y", 0.5, "0.5×", kind="bad")]
    panel = Bars("a $title", bars, "speedup", 1.0, "autoregressive")
    legend = [("method of the headline", "best", False), ("a series", 3, True)]
    picture = str(sheet([panel] * 4, legend))
    width, height, parts = drawn(panel)
    assert picture.count("".join(parts)) == 4 and "".join(parts) in draw(panel, 0)
    assert "var(--" not in picture  # every color is resolved
    for words in ("a $title", "method of the headline", "a series"):
        assert words in picture
    with Image.open(io.BytesIO(to_png(picture))) as image:
        assert image.width > 2.5 * 3 * width and image.height > 2.5 * 2 * height  # three beside each other
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 24)}
    assert {(0x00, 0x72, 0xB2), (0xC4, 0x4E, 0x00), (0x1B, 0x1F, 0x24)} <= colors  # bar, hatch, letters


def test_calibrations_and_classifiers_have_pictures_of_their_own(tmp_path):
    shutil.copy(BUNDLE / "calibration.json", tmp_path)
    shutil.copy(C2T / "classifier_report.json", tmp_path)
    draw_calibration(tmp_path)
    draw_classifier(tmp_path)
    for name in ("costs", "reliability", "classifier_reliability", "classifier_recall"):
        with Image.open(tmp_path / f"{name}.png") as image:
            assert image.width >= 900 and len(image.convert("RGB").getcolors(1 << 24)) > 50


def test_a_sweep_has_a_picture_of_its_own(tmp_path):
    points = read_points(C2T / "points_gsm8k.jsonl")
    write_sweep(points, tmp_path / "sweep.png")
    with Image.open(tmp_path / "sweep.png") as image:
        assert image.width >= 900 and len(image.convert("RGB").getcolors(1 << 24)) > 50


def test_depths_are_whole():
    chart = Chart("", [Series("a", 0, [1, 2], [0.2, 0.4], [""] * 2)], "depth", "share", (0.8, 2.2), (0, 1))
    for chart.counts, expected in (
        (True, ["1", "2"]),
        (False, ["1", "1.5", "2"]),
    ):
        svg = ElementTree.fromstring(str(draw(chart, 0)))
        words = [t.text for t in svg.iter("text") if t.get("y") == "220"]  # below the frame
        assert words == expected


def test_command(folder, capsys):
    out = folder / "pages" / "report.html"
    assert main(["report", str(folder), "--bundle", str(BUNDLE), "--out", str(out)]) == 0
    assert "MB" in capsys.readouterr().out and out.read_text().startswith("<!DOCTYPE html>")
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]
    assert main(["report", str(folder), "--out", str(folder)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_a_single_place_on_an_axis_is_drawn():
    for log_x, ends in ((False, (0.0, 0.0)), (True, (1.0, 1.0))):
        series = [Series("a", 0, [ends[0]], [1.0], ["only"])]
        drawn = draw(Chart("one", series, "x", "y", ends, (0.0, 2.0), log_x=log_x), 0)
        assert "only" in drawn and "nan" not in drawn and "inf" not in drawn


def test_ticks():
    assert ticks(0, 2.9) == [0, 1, 2] and ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(1, 2.4) == [1, 1.5, 2] and ticks(0, 8300) == [0, 2000, 4000, 6000, 8000]
    assert ticks(3, 3) == [3]


def test_names_with_dots(folder):
    """`llama-3.1.jsonl` and `llama-3.2.jsonl` have settings of their own."""
    for name in ("llama-3.1", "llama-3.2"):
        shutil.copy(folder / "measurements.jsonl", folder / f"{name}.jsonl")
    (folder / "llama-3.1_summary.json").write_text('{"format_version": 2, "dtype": "float16"}')
    text = write_report(folder / "llama-3.1.jsonl", folder / "b.html").read_text()
    assert "<h1>llama-3.1</h1>" in text and "float16" in text
    text = write_report(folder / "llama-3.2.jsonl", folder / "b.html").read_text()
    assert "<h1>llama-3.2</h1>" in text and "float16" not in text


def test_long_accepted_paths_are_drawn_whole():
    n = 60
    step = Iteration(
        tokens=list(range(n)),
        texts=["a"] * n,
        parents=list(range(-1, n - 1)),
        depths=list(range(n)),
        log_probs=[0.0] + [-0.5] * (n - 1),
        path=list(range(n)),
        emitted=list(range(1, n + 1)),
        pieces=["a"] * n,
        drafted=n - 1,
    )
    drawn = draw_tree("tree", step)
    assert [node.kind for node in drawn.nodes] == ["root"] + ["accepted"] * (n - 1) + ["own"]


def test_a_single_prompt_has_no_interval(tmp_path):
    text = page(written(tmp_path / "one", measurements("chat", turns=1)))
    assert "×<small>a single prompt<" in text and not re.search(r"[0-9]× \([0-9.]+–", text)
