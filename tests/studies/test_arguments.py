"""The arguments that studies share, and where shortened ones write."""

import pytest

from studies import arguments

RECORDS = "docs/results/raw/seed"


@pytest.mark.parametrize(
    "words, out, pictures",
    [
        ([], RECORDS, "docs/results"),
        (["--resume", "--repeats", "4", "--new-tokens", "96"], RECORDS, "docs/results"),
        (["--limit", "8"], RECORDS, "docs/results"),  # as many as by default
        (["--limit", "7"], "runs/seed", "runs/seed"),
        (["--repeats", "2"], "runs/seed", "runs/seed"),
        (["--seconds", "30"], "runs/seed", "runs/seed"),
        (["--max-steps", "5"], "runs/seed", "runs/seed"),  # by default as many as the study has
        (["--limit", "7", "--out", "here", "--pictures", "there"], "here", "there"),
        (["--limit", "7", "--out", RECORDS], RECORDS, RECORDS),
    ],
)
def test_shortened_runs_write_over_no_record(tmp_path, monkeypatch, words, out, pictures):
    monkeypatch.chdir(tmp_path)
    found = []
    names = ("limit", "repeats", "new_tokens", "seconds", "max_steps", "resume", "pictures")
    assert arguments.run(found.append, "", words, names, RECORDS, limit=8) == 0
    [args] = found
    assert (str(args.out), str(args.pictures)) == (out, pictures) and args.out.is_dir()


def test_other_folders_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    assert arguments.run(found.append, "", ["--limit", "7"], ("limit",), "runs/trees") == 0
    assert str(found[0].out) == "runs/trees"
