"""The command line as a user meets it: in a process of its own where that matters."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from largeprompt.paper.experiments import FIGURES


def largeprompt(*arguments, **options):
    # a narrow terminal without colours, whatever the machine; compiled as fast as in the other tests
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-c", "from largeprompt.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


def test_what_a_user_did_wrong_is_one_line():
    run = largeprompt("reproduce", "--preset", "huge")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == "largeprompt: preset is 'huge'; it must be one of smoke, quick, paper\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reproduce", "--preset", "smoke", "--seeds", "0"), "seeds is 0; it must be at least 1"),
        (("reproduce", "--preset", "smoke", "--score-scale", "nan"), "score_scale is nan"),
        (("reproduce", "--preset", "smoke", "--query-sigma", "round"), "the covariance is 'round'"),
        (("reproduce", "--preset", "smoke", "--figures", "2,nine"), "figure 'nine' is not one; they are 1a, 1b, 2"),
        (("reproduce", "--resume", "--out", "nowhere"), "nothing to resume"),
        (("figure", "13"), "figure '13' is not one"),
        (("verify", "--claims", "C99"), "claim 'C99' is not one; they are C1, C2"),
        (("verify", "--jobs", "0"), "jobs is 0; it must be at least 1"),
        (("report", "nowhere"), "nowhere"),
        (("reproduce", "--preset", "smoke", "--out", "/dev/null/here"), "/dev/null"),
        (("optima", "--sigma", "toeplitz"), "the covariance is 'toeplitz'; for d = 5 it must be identity, kms:RHO"),
        (("optima", "--sigma", "kms:2"), "rho is 2; it must lie between -1 and 1"),
        (("optima", "--sigma", "kms:x"), "has 'x' after its colon"),
        (("optima", "--sigma", "diagonal:1,2"), "for d = 5"),
        (("optima", "--d", "0"), "d is 0"),
        (("optima", "--noise", "-1"), "noise is -1; it must be at least 0"),
        (("optima", "--L", "0"), "--L has '0'; prompt lengths are whole numbers of at least 1"),
        (("optima", "--L", "10,5"), "--L has 10 before 5; prompt lengths must increase"),
        (("optima", "--L", "ten"), "--L has 'ten'; prompt lengths are whole numbers of at least 1"),
        (("flows", "--time", "-1"), "time is -1.0; it must be positive and finite"),
        (("flows", "--alpha", "0"), "alpha is 0, a saddle"),
        (("flows", "--L", "inf"), "--L has 'inf'; prompt lengths are whole numbers of at least 1"),
        (("flows", "--out", "/dev/null/here"), "/dev/null"),
    ],
)
def test_wrong_tasks_and_lengths_are_one_line(arguments, message, command):
    code, output, errors = command(*arguments)
    assert code == 2
    assert message in errors
    assert errors.count("\n") == 1
    assert output == ""


def test_an_unknown_option_is_refused_without_a_traceback(command):
    code, _, errors = command("reproduce", "--lenghts", "3")
    assert code == 2
    assert "Traceback" not in errors
    assert "--lenghts" in errors


def test_help_and_version(command):
    code, output, _ = command("--help")
    assert code == 0
    assert "reproduce" in output
    code, output, _ = command("--version")
    assert code == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", output)


def test_the_help_of_a_figure_names_all_and_says_where_results_are_kept(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("figure", "reproduce", "verify"):
        _, output, _ = command(name, "--help")
        (line,) = (line for line in output.splitlines() if "--store" in line)
        assert "[default: (OUT/store)]" in line
    _, output, _ = command("figure", "--help")
    assert all(re.search(rf"\b{key}\b", output) for key in FIGURES if key.isalpha())


def test_an_interrupt_ends_with_one_line_and_no_half_written_file(tmp_path):
    out = tmp_path / "out"
    # a shell's background job, which these tests may be, ignores interrupts, and so would what it starts
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heard}; from largeprompt.cli import main; main()"
    command = [sys.executable, "-c", program, "reproduce", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not out.exists() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(1)  # now it measures
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted" in errors
    left = {path.name for path in out.iterdir()}
    assert left <= {"run.json", "store"}
    assert "run.json" not in left or not json.loads((out / "run.json").read_text())["finished"]
