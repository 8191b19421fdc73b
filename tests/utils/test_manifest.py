"""A folder may be replaced while it is as we wrote it."""

from drafttrain.utils.folders import new_folder
from drafttrain.utils.manifest import is_ours, write_manifest


def test_a_folder_is_ours_while_it_is_as_we_wrote_it(tmp_path):
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
        write_manifest(folder)
    out = tmp_path / "out"
    assert is_ours(out)
    (out / "b").write_text("2")
    assert is_ours(out, {"b"}) and not is_ours(out) and not is_ours(out, {"c"})
    (tmp_path / "link").symlink_to(out)
    assert not is_ours(tmp_path / "link", {"b"})
    (out / "a").write_text("2")
    assert not is_ours(out, {"b"})
    (out / "a").write_text("1")
    (out / "b").unlink()
    (out / "b").mkdir()
    assert not is_ours(out, {"b"})
