"""The profile of decoding, of the tiny target."""

from studies import profile_decode


def test_profile(tiny_bundle, questions, capsys):
    words = ["--bundle", str(tiny_bundle), "--prompts", str(questions), "--tokens", "6", "--rows", "3"]
    assert profile_decode.main(words) == 0
    printed = capsys.readouterr().out
    assert "ms per step:" in printed and "tree policy" in printed and "aten::" in printed


def test_mistakes_are_one_line(capsys, tmp_path):
    assert profile_decode.main(["--bundle", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no config.json there" in line
