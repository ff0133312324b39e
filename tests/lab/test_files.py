import pytest

from largeprompt.lab import replacing


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
