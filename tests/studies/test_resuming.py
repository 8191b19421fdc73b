"""Raw data that an interrupted run has left."""

from argparse import Namespace

import pytest

from drafttrain.evaluation.metrics import Measurement, MethodRun
from drafttrain.utils.errors import UserError
from studies import resuming
from studies.resuming import open_log, whole_lines


def test_a_line_that_a_kill_cut_off_is_removed(tmp_path):
    raw = tmp_path / "raw.jsonl"
    assert whole_lines(raw) == [] and not raw.exists()
    raw.write_text('{"a": "ü"}\n{"b": 2}\n{"c"')
    assert whole_lines(raw) == ['{"a": "ü"}', '{"b": 2}']
    with open(raw, "a") as file:
        file.write('{"c": 3}\n')
    assert whole_lines(raw) == ['{"a": "ü"}', '{"b": 2}', '{"c": 3}']


@pytest.mark.parametrize("change", ["commit", "new_tokens", "depends"])
def test_measurements_of_other_settings_or_commits_are_not_gone_on_with(tmp_path, monkeypatch, change):
    args = Namespace(out=tmp_path, resume=False, target=None, new_tokens=8)
    monkeypatch.setattr(resuming, "git_commit", lambda: "a")
    open_log(args, "raw", ["bundle"]).add(Measurement("t", "1", 0, 0, 5, {"x": MethodRun(1.0, [2])}))
    args.resume = True
    assert open_log(args, "raw", ["bundle"]).find("t", "1", 0, 0, ["x"])
    if change == "commit":
        monkeypatch.setattr(resuming, "git_commit", lambda: "b")
    if change == "new_tokens":
        args.new_tokens = 9
    depends = ["other" if change == "depends" else "bundle"]
    with pytest.raises(UserError, match="holds measurements of other things"):
        open_log(args, "raw", depends)
    args.resume = False
    assert open_log(args, "raw", depends).find("t", "1", 0, 0, ["x"]) is None
