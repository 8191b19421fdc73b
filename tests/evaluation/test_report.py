"""The printed tables hold the numbers and every warning."""

import io

from rich.console import Console

from drafttrain.evaluation.report import describe_difference, print_tables, task_table

ROW = {
    "prompts": 12,
    "repeats": 2,
    "accept_len": 1.953,
    "accept_len_fresh": 1.8,
    "repetition": 0.257,
    "verify_per_step": 4.0,
    "tokens_per_second": 51.26,
    "speedup": 1.27,
    "speedup_transformers": 1.5,
    "identical": 0.75,
    "acceptance_by_depth": [0.6, 0.5],
    "time_split": {"prefill": 0.1, "draft": 0.2, "verify": 0.6, "other": 0.1},
    "flags": ["noisy: [half]"],
}
OTHER = dict.fromkeys(ROW) | {
    "prompts": 12,
    "repeats": 2,
    "tokens_per_second": 40.0,
    "flags": ["noisy: [half]", "busy"],
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
    "behind": 0.00012,
    "logit_std": 2.5,
}
SUMMARY = {
    "tasks": {"GSM8K": {"transformers": OTHER, "chain-4": ROW}},
    "machine": {"threads": 2, "processor": "Some CPU"},
    "dtype": "bfloat16",
    "max_new_tokens": 96,
    "tuning": [
        {"tree": "chain:length=4", "tokens_per_second": 50.0},
        {"tree": "chain:length=5", "tokens_per_second": 48.0},
    ],
    "lossless": {"prompts": 16, "mismatches": 1, "differences": [DIFFERENCE]},
}


def test_tables():
    console = Console(file=io.StringIO(), width=120)
    print_tables(SUMMARY, console)
    text = console.file.getvalue()
    for part in ("GSM8K: 12 answers, 2 repeats", "1.95", "1.80", "26%", "51.3", "1.27x", "1.50x", "75%"):
        assert part in text
    for part in (
        "transformers",
        "accepted by depth: 0.60 0.50",
        "noisy: [half]",
        "tuning prompts: chain:length=4 50.0; chain:length=5 48.0",
    ):
        assert part in text
    assert "GSM8K, transformers, chain-4: noisy" in text and "GSM8K, transformers: busy" in text
    assert "15 of 16 outputs equal plain decoding" in text
    assert "the target's own token included" in text and "2 threads of Some CPU" in text


def test_nothing_is_cut_off_in_80_columns():
    console = Console(file=io.StringIO(), width=80)
    plain = {**ROW, "tokens_per_second": 1234.5, "speedup_transformers": 12.34, "identical": 1.0}
    console.print(task_table("GSM8K", {"autoregressive": plain, "transformers": OTHER, "chain-16": ROW}))
    text = console.file.getvalue()
    assert "…" not in text and "accept_len" in text and "autoregressive" in text and "1234.5" in text


def test_without_tuning_and_fp32():
    console = Console(file=io.StringIO(), width=120)
    print_tables({**SUMMARY, "tuning": [], "lossless": None}, console)
    assert "tuning" not in console.file.getvalue() and "fp32" not in console.file.getvalue()


def test_difference_in_one_line():
    line = describe_difference(DIFFERENCE)
    assert "GSM8K, prompt 7" in line and "0.00012" in line and "\n" not in line
