"""Folders of other runs that are taken over."""

import shutil

import pytest

from drafttrain.run.copies import share_folder
from drafttrain.utils.errors import UserError
from drafttrain.utils.provenance import RECORD
from drafttrain.utils.writing import write_json


@pytest.mark.parametrize("lost", [RECORD, "b.txt"])
def test_a_folder_that_changes_while_it_is_copied_is_refused(lost, tmp_path, monkeypatch):
    """Its own run makes it again, and begins with the removal of its record."""
    twin, copy_file = tmp_path / "twin", shutil.copy2
    twin.mkdir()
    for name in ("a.txt", "b.txt"):
        (twin / name).write_text(name)
    record = {"made_from": {"section": {}, "inputs": {}}, "output": "o", "figures": {}, "wall_seconds": 1.0}
    write_json(twin / RECORD, record)

    def copy(source, target):
        (twin / lost).unlink(missing_ok=True)
        return copy_file(source, target)

    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match="twin: must not change while it is copied, got"),
    ):
        patch.setattr(shutil, "copy2", copy)
        share_folder(twin, tmp_path / "copy", links=False)
    assert not (tmp_path / "copy").exists()
    write_json(twin / RECORD, record)
    share_folder(twin, tmp_path / "copy", links=False)
    assert (tmp_path / "copy" / "a.txt").read_text() == "a.txt"
