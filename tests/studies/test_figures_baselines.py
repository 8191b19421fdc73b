"""The figures of topic `baselines` on a tiny target."""

import importlib

import pytest

from drafttrain.evaluation import benchmark
from studies.goals import Run


@pytest.fixture
def topic(tmp_path, monkeypatch, tiny_target_folder, tiny_bundle, questions):
    module = importlib.import_module("studies.figures.baselines")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "TARGET", str(tiny_target_folder))
    monkeypatch.setattr(module, "METHODS", (f"edd={tiny_bundle}@chain:length=2", "prompt_lookup"))
    monkeypatch.setattr(module, "TASKS", (f"one={questions}", f"two={questions}"))
    monkeypatch.setattr(module, "NEW_TOKENS", 6)
    monkeypatch.setattr(benchmark, "check_quiet", lambda refuse: None)
    return module


def test_names_and_goals(topic):
    goals = {name: goal for group in topic.GROUPS for name, goal in group.goals.items()}
    assert goals["benchmark_overhead"] == "<= 0.01" and goals["benchmark_repeatability"] == "<= 0.05"


def test_overhead(topic):
    found = topic.overhead(Run("baselines", limit=1))["benchmark_overhead"]
    assert 0 < found["value"] < 1 and found["turns"] == 2 * 2 * topic.REPEATS and found["seconds"] > 0


def test_repeatability(topic, monkeypatch):
    speedups = iter([{"edd": 2.0, "prompt_lookup": 1.0}, {"edd": 2.1, "prompt_lookup": 0.98}])

    def row(method, speedup, task="all", context=None):
        return {"method": method, "task": task, "context": context, "speedup": speedup}

    def stub(config, out):
        out.mkdir()
        rows = [row(method, speedup) for method, speedup in next(speedups).items()]
        others = [row("edd", 9.0, "one"), row("edd", 9.0, "all", "0-255")]
        return {"rows": [row("autoregressive", 1.0), *rows, *others]}

    monkeypatch.setattr(topic, "benchmark", stub)
    found = topic.repeatability(Run("baselines"))["benchmark_repeatability"]
    assert found["value"] == pytest.approx(0.05)
    assert found["differences"]["prompt_lookup"] == pytest.approx(0.02)
    assert found["speedups"]["edd"] == [2.0, 2.1]


def test_quick_runs_are_short(topic):
    quick, full = topic.config(Run("b", quick=True)), topic.config(Run("b"))
    assert (quick.limit, quick.repeats) == (1, 1) and (full.limit, full.repeats) == (topic.PROMPTS, 3)
