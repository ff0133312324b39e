import errno

import pytest

from largeprompt.lab import replacing, writable_folder


def test_a_file_appears_whole(tmp_path):
    path = tmp_path / "data.txt"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_no_trace(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("old")

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_file_is_as_readable_as_any_other(tmp_path):
    path, plain = tmp_path / "data.txt", tmp_path / "plain.txt"
    plain.write_text("")
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("named", [(), ("/tmp/.data-xyz.txt",)])
def test_an_error_of_writing_names_the_file_that_was_wanted(named, tmp_path):
    path = tmp_path / "data.txt"
    with pytest.raises(OSError, match="No space left on device") as caught, replacing(path):
        raise OSError(errno.ENOSPC, "No space left on device", *named)
    assert caught.value.filename == str(path)


def test_a_folder_is_made_and_tried_and_nothing_is_left_in_it(tmp_path):
    writable_folder(tmp_path / "new" / "folder", files=["a.txt"], folders=["b"])
    assert list((tmp_path / "new" / "folder").iterdir()) == []
