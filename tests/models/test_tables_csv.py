"""Tables from CSV files: what is a number, a category, a missing value; and files that are refused."""

import numpy as np
import pytest

from largeprompt.models.tables import read_table

TABLE = """\
"",size,colour,"weight, kg",empty,cut
1,1.5,red,10,,good
2,NA,blue,1e3,,bad
3,-2,red,?,,
4,0,,7,NaN,good
"""


def written(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "table.csv"
    path.write_bytes(text.encode(encoding))
    return path


def test_columns_are_numbers_or_codes_of_categories(tmp_path):
    table = read_table(written(tmp_path, TABLE), "cut")
    assert table.columns == ("size", "colour", "weight, kg")
    np.testing.assert_array_equal(table.values, [[1.5, 1, 10], [np.nan, 0, 1000], [0, np.nan, 7]])
    assert table.categories == {"colour": ("blue", "red")}
    assert table.classes == ("bad", "good")
    assert table.labels.tolist() == [1, 0, 1]
    assert table.lines.tolist() == [2, 3, 5]
    assert [remark.split(";")[1] for remark in table.remarks] == [" they are left out", *[" it is left out"] * 2]


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    assert read_table(written(tmp_path, "x,y\n1,10\n2,9\n3,10\n"), "y").classes == ("9", "10")


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_and_a_mark_at_the_start_are_understood(tmp_path, separator):
    text = "\ufeffx,y\n1,a\n2,b\n".replace(",", separator)
    table = read_table(written(tmp_path, text), "y")
    assert table.columns == ("x",)
    assert table.values[:, 0].tolist() == [1, 2]


def test_quoted_cells_may_hold_separators_and_lines(tmp_path):
    table = read_table(written(tmp_path, 'x,y\n"a, ""b""\nc",1\nd,2\n'), "y")
    assert table.categories["x"] == ('a, "b"\nc', "d")


def test_an_unnamed_column_that_does_not_count_rows_is_kept(tmp_path):
    assert read_table(written(tmp_path, ",x,y\n3,1,a\n1,2,b\n"), "y").columns == ("", "x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty or begins with an empty line"),
        ("\nx,y\n1,2\n", "is empty or begins with an empty line"),
        ("x,y\n", "has 0 rows below its header"),
        ("x,y\n1,2\n", "has 1 rows below its header"),
        ("x,z\n1,2\n3,4\n", "has no column 'y' for --target; its columns are x, z"),
        ("x,y\n1,2\n3\n", r"line 3 has 1 cells; the header has 2"),
        ("x,y\n1,2\n3,4,5\n", r"line 3 has 3 cells; the header has 2"),
        ("x,x,y\n1,2,3\n1,2,4\n", "has 2 columns 'x'; their names must differ"),
        ("x,y\n1,\n2,NA\n", "has no row with a y"),
        ("x,y\n,1\n,2\n", "has no column with values beside y"),
        ("x,y\n1e39,1\n2,2\n", "x is 1e39 in row 1; numbers are at most 3e38"),
        ("x,y\ninf,1\n2,2\n", "x is inf in row 1; numbers are at most 3e38"),
    ],
)
def test_files_that_are_no_table_are_refused_in_one_line(tmp_path, text, said):
    with pytest.raises(ValueError, match=said) as error:
        read_table(written(tmp_path, text), "y")
    assert "\n" not in str(error.value)


def test_a_file_in_another_encoding_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not text in UTF-8: byte 4 is 0xe9"):
        read_table(written(tmp_path, "x,y\né,1\nb,2\n", "latin-1"), "y")
