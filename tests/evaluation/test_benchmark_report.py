"""The printed benchmark: every method and number within 80 columns, and what it all means."""

import io

from rich.console import Console

from drafttrain.evaluation.benchmark_report import print_benchmark

METHODS = ("autoregressive", "transformers", "edd timed [x]", "prompt_lookup")
ROW = {
    "prompts": 12,
    "repeats": 3,
    "accept_len": 2.345,
    "verify_per_step": 12.34,
    "tokens_per_second": 1234.5,
    "speedup": 12.34,
    "speedup_transformers": 23.45,
    "spread": 0.123,
    "identical": 1.0,
    "peak_bytes": 12_345_000_000,
    "acceptance_by_depth": [0.6, 0.5],
    "time_split": {"prefill": 0.1, "draft": 0.2, "verify": 0.6, "other": 0.1},
    "flags": [],
}


def summary(tasks=("chats", "code"), contexts=("0-255", "256-511"), temperatures=(0.0, 0.7)) -> dict:
    rows = []
    for temperature in temperatures:
        places = [(task, None) for task in (*tasks, "all")] + [("all", context) for context in contexts]
        for task, context in places:
            for method in METHODS:
                row = {**ROW, "temperature": temperature, "task": task, "context": context, "method": method}
                if method == "transformers":
                    row.update(dict.fromkeys(("accept_len", "verify_per_step", "identical", "peak_bytes")))
                    row.update(acceptance_by_depth=None, time_split=None)
                rows.append(row)
    return {
        "rows": rows,
        "tasks": {task: {"source": "x", "prompts": 12, "too_long": 2 * (task == "code")} for task in tasks},
        "machine": {"threads": 2, "processor": "Some CPU"},
        "target": {"name": "some target", "dtype": "bfloat16"},
        "methods": {"autoregressive": {}, "transformers": {"dtype": "float32", "tokens_per_second": {}}},
        "settings": {"max_new_tokens": 96, "repeats": 3},
        "peak_memory": {"bytes": 2_000_000_000, "covers": "everything"},
    }


def printed(what: dict) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_benchmark(what, console)
    return console.file.getvalue()


def test_everything_fits_80_columns():
    text = printed(summary())
    assert "…" not in text and all(len(line) <= 80 for line in text.split("\n"))
    for title in ("chats, greedy: 12 answers, 3 repeats", "code, temperature 0.7", "all, greedy"):
        assert title in text
    for number in ("2.35", "12.3", "1234.5", "12.34x", "23.45x", "12%", "100%", "12.35"):
        assert number in text
    assert "edd timed [x]" in text and "0-255" in text and "256-511" in text
    assert text.count("edd timed [x]: accepted by depth: 0.60 0.50; time: prefill 10%") == 2  # over all tasks
    assert "code: 2 chat turns left out" in text and "chats: " not in text
    assert "peak memory 2.00 GB: everything" in text and "docs/benchmark.md" in text


def test_one_task_of_one_length_is_not_said_twice():
    text = printed(summary(("chats",), ("0-255",), (0.0,)))
    assert "all, greedy" not in text and "0-255" not in text
    assert text.count("accepted by depth") == 3  # of all methods but transformers


def test_names_of_methods_are_no_markup():
    what = summary(("chats",), ("0-255",), (0.0,))
    for row in what["rows"]:
        row["method"] = {"edd timed [x]": "edd [bold] v[/]"}.get(row["method"], row["method"])
    assert printed(what).count("edd [bold] v[/]") == 2  # in the table, and below it


def test_flags_of_all_methods_are_printed_once():
    what = summary(("chats",), ("0-255",), (0.0,))
    for row in what["rows"]:
        row["flags"] = ["busy", "slow"] if row["method"] == "prompt_lookup" else ["busy"]
    text = printed(what)
    assert "chats, greedy, all methods: busy" in text and "chats, greedy, prompt_lookup: slow" in text
