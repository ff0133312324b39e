"""Measurements on a machine without a GPU, when one is asked for."""

import json


def test_without_a_gpu_one_line_says_so_and_the_numbers_are_those_of_the_processor(command):
    options = (
        "--d",
        "2",
        "--L",
        "4,16",
        "--replicates",
        "40",
        "--layer",
        "identity:0.3",
        "--quantity",
        "output",
        "--no-bounds",
        "--json",
    )
    (code, out, err), (_, plain, quiet) = (command("concentration", *options, "--device", x) for x in ("gpu", "cpu"))
    assert (code, quiet) == (0, "")
    assert err.startswith("largeprompt: no GPU: JAX sees cpu alone")
    assert len(err.splitlines()) == 1
    assert json.loads(out)["rows"] == json.loads(plain)["rows"]
    assert "device" not in json.loads(out)["settings"]["toml"]
    length = ("prompt-length", "--d", "2", "--layer", "identity:0.3", "--replicates", "20", "--epsilon", "0.5")
    code, _, err = command(*length, "--device", "gpu")
    assert (code, err.count("\n"), err[:19]) == (0, 1, "largeprompt: no GPU")
