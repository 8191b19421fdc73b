"""The printed tables: every method, number and warning, readable within 80 columns."""

import io
import re

import pytest
from rich.console import Console

from drafttrain.evaluation.report import describe_difference, print_benchmark, print_tables

METHODS = ("autoregressive", "transformers", "edd timed [x]", "eagle2:top_k=10,max_depth=6")
ROW = {
    "prompts": 12,
    "repeats": 3,
    "accept_len": 2.345,
    "accept_len_nonrepeated": 1.8,
    "repetition": 0.257,
    "verify_per_step": 12.34,
    "tokens_per_second": 1234.5,
    "speedup": 12.34,
    "speedup_interval": [11.23, 13.45],
    "speedup_transformers": 23.45,
    "identical": 1.0,
    "peak_bytes": 12_345_000_000,
    "acceptance_by_depth": [0.6, 0.5],
    "time_split": {"prefill": 0.1, "draft": 0.2, "verify": 0.6, "other": 0.1},
    "flags": [],
}
OTHER = {**dict.fromkeys(ROW), "prompts": 12, "repeats": 3, "tokens_per_second": 40.0, "flags": []}
MACHINE = {"threads": 2, "processor": "Some CPU"}
STOCK = {"dtype": "float32", "tokens_per_second": {}}


def benchmark_summary(
    tasks=("chats", "code"), contexts=("0-255", "256-511"), temperatures=(0.0, 0.7)
) -> dict:
    rows = []
    for temperature in temperatures:
        places = [(task, None) for task in (*tasks, "all")] + [("all", context) for context in contexts]
        for task, context in places:
            place = {"temperature": temperature, "task": task, "context": context}
            rows += [
                {**(OTHER if method == "transformers" else ROW), **place, "method": method}
                for method in METHODS
            ]
    return {
        "rows": rows,
        "tasks": {task: {"source": "x", "prompts": 12, "too_long": 2 * (task == "code")} for task in tasks},
        "machine": MACHINE,
        "target": {"name": "some target", "dtype": "bfloat16"},
        "methods": {"autoregressive": {}, "transformers": STOCK},
        "settings": {"max_new_tokens": 96, "repeats": 3},
        "peak_memory": {"bytes": 2_000_000_000, "covers": "everything"},
    }


DIFFERENCE = {
    "task": "GSM8K",
    "prompt": "7",
    "method": "drafting",
    "position": 3,
    "expected": 11,
    "found": 12,
    "top2": [11, 12],
    "gap": 0.00012,
    "below_best": 0.00025,
    "logit_std": 2.5,
    "noise": 0.001,
}
SUMMARY = {
    "tasks": {"GSM8K": {"transformers": OTHER, "chain:length=4": ROW}},
    "machine": MACHINE,
    "dtype": "bfloat16",
    "transformers": STOCK,
    "max_new_tokens": 96,
    "tuning": [
        {"tree": "chain:length=4", "tokens_per_second": 50.0},
        {"tree": "chain:length=5", "tokens_per_second": 48.0},
    ],
    "lossless": {"prompts": 16, "mismatches": 1, "differences": [DIFFERENCE]},
}


def printed(summary: dict, show=print_benchmark, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(summary, console)
    return console.file.getvalue()


def test_a_benchmark_in_80_columns():
    text = printed(benchmark_summary())
    assert "…" not in text and all(len(line) <= 80 for line in text.split("\n"))
    for title in ("chats, greedy: 12 answers, 3 repeats", "code, temperature 0.7", "all, greedy"):
        assert title in text
    for number in ("2.35", "12.3", "1234.5", "12.34x", "11.23-13.45", "23.45x", "100%", "12.35"):
        assert number in text
    assert "edd timed [x]" in text
    assert "all, greedy, 0-255 tokens of context" in text and "256-511 tokens of context" in text
    plain = " ".join(text.split())
    line = (
        "edd timed [x]: 26% of the tokens repeat earlier ones, accept_len of the others 1.80; accepted by "
        "depth: 0.60 0.50; time: prefill 10%"
    )
    assert plain.count(line) == 2  # over all tasks
    assert "code: 2 chat turns left out" in text and "chats: " not in text
    assert "peak memory 2.00 GB: everything" in text and "docs/metrics.md" in text


def test_headings_and_numbers_keep_their_distance():
    """With the widest numbers a column is at least two spaces from the next, in both lines of the heading."""
    lines = printed(benchmark_summary(("chats",), ("0-255",), (0.0,))).split("\n")
    first = next(i for i, line in enumerate(lines) if "tokens" in line and "accept" in line)
    rule = lines[first + 2]
    assert set(rule.strip()) == {"─"} and len(rule.rstrip()) <= 80
    row = next(line for line in lines if "1234.5" in line)
    ends = [match.end() for match in re.finditer(r"\S+", row[14:].rstrip())]
    assert len(ends) == 8
    for line in lines[first : first + 2]:
        words = [match.end() for match in re.finditer(r"\S+( %)?", line[14:].rstrip())]
        assert set(words) <= set(ends), line  # each is above the last digit of its numbers
        assert "  " in line.strip() and not re.search(r"\S \S{3,} \S{3,} \S{3,}", line)


def test_one_task_of_one_length_is_printed_once():
    text = printed(benchmark_summary(("chats",), ("0-255",), (0.0,)))
    assert "all, greedy" not in text and "0-255" not in text
    assert " ".join(text.split()).count("accepted by depth") == 3  # of all methods but transformers


def test_names_of_methods_are_no_markup():
    summary = benchmark_summary(("chats",), ("0-255",), (0.0,))
    for row in summary["rows"]:
        row["method"] = {"edd timed [x]": "edd [bold] v[/]"}.get(row["method"], row["method"])
    assert printed(summary, width=120).count("edd [bold] v[/]") == 2  # in the table, and below it


def test_flags_of_all_methods_are_printed_once():
    summary = benchmark_summary(("chats",), ("0-255",), (0.0,))
    for row in summary["rows"]:
        row["flags"] = ["busy", "slow: [half]"] if row["method"] == METHODS[2] else ["busy"]
    text = printed(summary)
    assert "chats, greedy, all methods: busy" in text and f"chats, greedy, {METHODS[2]}: slow: [half]" in text


@pytest.mark.parametrize("width", [80, 120])
def test_an_evaluation(width):
    text = printed(SUMMARY, print_tables, width)
    assert all(len(line) <= width for line in text.split("\n")) and "…" not in text
    plain = " ".join(text.split())
    for part in ("GSM8K: 12 answers, 3 repeats", "2.35", "1.80", "26%", "12.34x", "23.45x", "100%"):
        assert part in plain
    for part in (
        "chain:length=4: 26% of the tokens",
        "tokens per second on the tuning prompts: chain:length=4 50.0; chain:length=5 48.0",
        "fp32: 15 of 16 outputs equal plain decoding token by token",
        "GSM8K, prompt 7, token 4: 11 by plain decoding, 12 by drafting",
        "bfloat16 (transformers in float32), 2 threads of Some CPU, at most 96 new tokens, batch 1",
    ):
        assert part in plain


def test_what_has_no_value_is_a_dash():
    row = {**ROW, "accept_len_nonrepeated": None, "peak_bytes": None}
    tasks = {"GSM8K": {"chain:length=4": row}}
    text = printed({**SUMMARY, "tasks": tasks, "lossless": None}, print_tables)
    assert "accept_len of the others –;" in " ".join(text.split())
    assert re.search(r"100%\s+–\n", text)  # peak GB
    assert "0.00" not in text and "None" not in text


def test_a_task_alone_is_shown_once():
    rows = SUMMARY["tasks"]["GSM8K"]
    for tasks, n in (({"GSM8K": rows, "all": rows}, 1), ({"GSM8K": rows, "MMLU": rows, "all": rows}, 3)):
        text = printed({**SUMMARY, "tasks": tasks}, print_tables)
        assert len(re.findall("12 answers", text)) == n


def test_an_evaluation_without_tuning_and_fp32():
    text = printed({**SUMMARY, "tuning": [], "lossless": None}, print_tables)
    assert "tuning" not in text and "fp32" not in text


def test_a_difference_in_one_line():
    line = describe_difference(DIFFERENCE)
    assert "GSM8K, prompt 7, token 4" in line and "0.00012" in line and "0.00025" in line
    assert "(0.0001 standard deviations)" in line and "up to 0.001" in line and "\n" not in line
    ended = describe_difference({**DIFFERENCE, "below_best": None, "found": "the end"})
    assert "the end by drafting" in ended and "rounding" not in ended
