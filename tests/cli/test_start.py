"""The first minute: help without heavy imports, compiled programs that are kept, and what the doctor says."""

import json
import os
import re
import subprocess
import sys

import pytest

from largeprompt import _compiled
from largeprompt.cli import _doctor

HEAVY = ("jax", "numpy", "scipy", "equinox", "diffrax", "numba", "matplotlib", "xarray", "plotly", "torch")
# Several commands in one process, each with the heavy modules that are imported once it has ended.
COMMANDS = """
import contextlib, io, os, sys
from largeprompt.cli import main
def run(*arguments):
    sys.argv = ["largeprompt", *arguments]
    output = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        main()
    heavy = sys.modules.keys() & set(HEAVY)
    print(*arguments, *sorted(heavy), file=sys.__stdout__)
for line in ("--help", "--version", "train --help", "runs rm --help", "train --wrong", "wrong"):
    run(*line.split())
os.environ |= {"_LARGEPROMPT_COMPLETE": "complete_bash", "COMP_WORDS": "largeprompt train --st", "COMP_CWORD": "2"}
run()
"""


def test_help_completion_and_misspelt_options_import_nothing_heavy():
    program = COMMANDS.replace("HEAVY", repr(HEAVY))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = ["--help", "--version", "train --help", "runs rm --help", "train --wrong", "wrong", ""]
    assert run.stdout.splitlines() == lines


def test_the_shell_completes_options():
    environment = {"_LARGEPROMPT_COMPLETE": "complete_bash", "COMP_WORDS": "largeprompt train --st", "COMP_CWORD": "2"}
    program = "import sys; sys.argv[0] = 'largeprompt'; from largeprompt.cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert {"--steps", "--store", "--start"} <= set(run.stdout.split())


def test_importing_the_package_imports_nothing_heavy():
    program = f"import sys, largeprompt; print(*sorted(sys.modules.keys() & set({HEAVY!r})))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "\n"


COMPILE = """
import jax, largeprompt as lp
print(lp.keep_compiled())
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
print(jax.jit(lambda x: x * 3 + 1)(2.0))
print(len(hits) > 0)
"""


def compiled(folder, **environment):
    environment = {**os.environ, "LARGEPROMPT_CACHE": str(folder), **environment}
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=True, env=environment)
    assert run.stderr == ""
    place, value, loaded = run.stdout.split()
    assert value == "7.0"
    return place, loaded == "True"


def test_compiled_programs_are_loaded_again_and_damaged_ones_are_compiled_again(tmp_path):
    place, loaded = compiled(tmp_path)
    assert not loaded
    assert place.startswith(str(tmp_path))
    assert compiled(tmp_path) == (place, True)
    for _, size, file in _compiled.programs(tmp_path):
        file.write_bytes(file.read_bytes()[: size // 2])
    assert compiled(tmp_path) == (place, False)


def test_a_home_that_is_not_there_is_no_cache(monkeypatch):
    monkeypatch.setenv("LARGEPROMPT_CACHE", "~no such user/cache")
    assert _compiled.cache_folder() is None


def test_the_cache_can_be_turned_off_and_another_one_is_left_alone(tmp_path):
    assert compiled("off") == ("None", False)
    other = tmp_path / "other"
    assert compiled(tmp_path, JAX_COMPILATION_CACHE_DIR=str(other))[0] == str(other)
    assert _compiled.programs(tmp_path) == []


QUICK = """
import os, jax, jax.numpy as jnp, largeprompt as lp
lp.compile_quickly()
lp.compile_quickly()
print(os.environ.get("XLA_FLAGS", ""))
from largeprompt._compiled import optimised_jit
f = optimised_jit(lambda x: jnp.sin(x) ** 2 + 1)
x = jnp.zeros(3)
print(f(x)[0], jax.jit(lambda x: f(x) * 2)(x)[0], jax.grad(lambda x: f(x).sum())(x)[0], jax.vmap(f)(x)[0])
"""


def test_with_few_optimisations_programs_run_optimised_or_not_alone_or_within_others():
    given = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run([sys.executable, "-c", QUICK], capture_output=True, text=True, check=True, env=given)
    assert (run.stdout.splitlines(), run.stderr) == ([_compiled._quick_flags(), "1.0 2.0 0.0 1.0"], "")


@pytest.mark.parametrize(("given", "level"), [(None, "1"), ("3", "3")])
def test_the_engine_has_the_first_level_of_optimisation_unless_another_is_asked_for(monkeypatch, given, level):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.delenv("NUMBA_OPT", raising=False)
    if given is not None:
        monkeypatch.setenv("NUMBA_OPT", given)
    _compiled.compile_quickly()
    assert os.environ["NUMBA_OPT"] == level


def quickly(monkeypatch, given):
    """What `compile_quickly` makes of `XLA_FLAGS`."""
    monkeypatch.setenv("XLA_FLAGS", given)
    _compiled.compile_quickly()
    _compiled.compile_quickly()
    return os.environ["XLA_FLAGS"]


def test_compiling_quickly_adds_to_the_flags_of_the_compiler_once(monkeypatch):
    assert quickly(monkeypatch, "") == _compiled._quick_flags()
    other, own = "--xla_force_host_platform_device_count=1", "--xla_backend_optimization_level=2"
    assert quickly(monkeypatch, other) == f"{other} {_compiled._quick_flags()}"
    assert quickly(monkeypatch, own) == own


def test_beside_a_build_for_gpus_nothing_is_compiled_quickly(monkeypatch, tmp_path):
    (tmp_path / "jax_cuda12_plugin.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert quickly(monkeypatch, "") == ""


@pytest.mark.parametrize(
    ("flags", "options"), [(_compiled._quick_flags(), [1, True, 1]), ("--xla_cpu_foo=1", None), ("", None)]
)
def test_what_runs_long_is_optimised_where_others_are_compiled_quickly(monkeypatch, flags, options):
    asked = []

    def filter_jit(function, **given):
        def call(*args):
            asked.append(given.get("compiler_options"))
            return function(*args)

        return call

    monkeypatch.setattr("equinox.filter_jit", filter_jit)
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert _compiled.optimised_jit(lambda x: x + 1)(1) == 2
    (given,) = asked
    assert (given if given is None else list(given.values())[:3]) == options


def test_the_programs_used_longest_ago_are_dropped_first_and_once_a_day(tmp_path):
    folder = tmp_path / "xla-0"
    folder.mkdir()
    for age in range(4):
        file = folder / f"jit_{age}-cache"
        file.write_bytes(bytes(10))
        os.utime(file, (1e9 - age, 1e9 - age))
    mine = folder / "notes.txt"
    mine.write_text("not a program")
    _compiled.drop_oldest(tmp_path, limit=25)
    assert sorted(file.name for _, _, file in _compiled.programs(tmp_path)) == ["jit_0-cache", "jit_1-cache"]
    assert mine.exists()
    _compiled.drop_oldest(tmp_path, limit=0)  # looked at a moment ago
    assert len(_compiled.programs(tmp_path)) == 2


def test_programs_of_a_gpu_are_kept_under_their_key_and_count_with_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("LARGEPROMPT_CACHE", str(tmp_path))
    assert _compiled.kept("some-key") is None
    _compiled.keep("some-key", b"machine code")
    _compiled.keep("some-key", b"newer code")
    assert _compiled.kept("some-key") == b"newer code"
    assert _compiled.kept("other-key") is None
    ((_, size, file),) = _compiled.programs(tmp_path)
    assert size == len(b"newer code")
    assert list(file.parent.iterdir()) == [file]  # nothing half written is left


@pytest.mark.parametrize("place", ["off", "file"])
def test_without_a_folder_programs_of_a_gpu_are_not_kept(tmp_path, monkeypatch, place):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LARGEPROMPT_CACHE", "off" if place == "off" else str(tmp_path / "file"))
    _compiled.keep("some-key", b"machine code")
    assert _compiled.kept("some-key") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_folder_that_cannot_be_made_is_a_warning_or_when_asked_for_an_error(tmp_path, monkeypatch):
    import jax

    file = tmp_path / "file"
    file.touch()
    before = jax.config.jax_compilation_cache_dir  # pyrefly: ignore[missing-attribute]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        monkeypatch.setenv("LARGEPROMPT_CACHE", str(file))
        with pytest.warns(UserWarning, match="compiled programs are not kept"):
            assert _compiled.keep_compiled() is None
        with pytest.raises(OSError, match="file"):
            _compiled.keep_compiled(file)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(OSError, match=str(file)):
            _compiled.keep_compiled("~/file")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_command_compiles_quickly_and_without_a_cache_says_so_in_one_line_and_runs(tmp_path):
    file = tmp_path / "file"
    file.touch()
    program = f"""
import os, runpy, sys
sys.argv = ["largeprompt", "runs", "list", "--store", {str(tmp_path)!r}]
try:
    runpy.run_module("largeprompt", run_name="__main__")
finally:
    print(os.environ["XLA_FLAGS"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["LARGEPROMPT_CACHE"] = str(file)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert run.returncode == 0
    assert run.stdout.splitlines()[-1] == _compiled._quick_flags()
    assert re.fullmatch(r"largeprompt: compiled programs are not kept: \S+: Not a directory; .*\n", run.stderr)


def test_a_module_that_fails_or_ends_the_process_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text("print('hello')\nraise AttributeError('no attribute\\nrow_stack')")
    (tmp_path / "dies.py").write_text(
        "import os, sys\nprint('F: unknown flag', file=sys.stderr, flush=True)\nos._exit(6)"
    )
    (tmp_path / "works.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert list(_doctor.imported(["fails", "dies", "works", "nowhere"])) == [
        ("fails", False, "AttributeError: no attribute row_stack"),
        ("dies", False, "F: unknown flag"),
        ("works", True, ""),
        ("nowhere", False, "ModuleNotFoundError: No module named 'nowhere'"),
    ]


@pytest.mark.parametrize("printed", ["no new line", '["a" b\n', '["numpy", false, "fake"]\n'])
def test_what_a_module_prints_is_no_answer(tmp_path, monkeypatch, printed):
    (tmp_path / "prints.py").write_text(f"import os\nprint({printed!r}, end='')\nos.write(1, {printed.encode()!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert list(_doctor.imported(["prints", "numpy"])) == [("prints", True, ""), ("numpy", True, "")]


def answers(**broken):
    def imported(names):
        found = {"devices": (True, "cpu (cpu)"), "cuda": (True, "CUDA finds no device and driver"), **broken}
        return [(name, *found.get(name, (True, ""))) for name in names]

    return imported


def test_the_doctor_says_what_there_is(command, monkeypatch):
    monkeypatch.setattr(_doctor, "imported", answers())
    code, output, errors = command("doctor", "--json")
    assert (code, errors) == (0, "")
    found = json.loads(output)
    assert found["broken"] == 0
    checks = {check["name"]: check for check in found["checks"]}
    assert {"largeprompt", "python", "jax", "jaxlib", "numpy", "numba", "devices of JAX", "compiled programs"} <= {
        *checks
    }
    assert checks["jax"]["found"] == _doctor.metadata.version("jax")
    assert checks["GPU of the engine"]["state"] == "none"


def test_what_is_broken_is_named_with_its_cure_and_the_exit_code_is_1(command, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("LARGEPROMPT_CACHE", str(file))
    broken = {"numba": (False, "ImportError: NumPy is too new"), "distributed": (False, "RuntimeError: no library")}
    monkeypatch.setattr(_doctor, "imported", answers(**broken))
    code, output, _ = command("doctor")
    assert code == 1
    assert 'cannot be imported: RuntimeError: no library; pip install "largeprompt[cluster]"\n' in output
    assert "cannot be imported: ImportError: NumPy is too new; pip install --force-reinstall numba\n" in output
    assert "nothing can be written there: set LARGEPROMPT_CACHE to another folder, or to off\n" in output
    assert output.endswith("3 are broken\n")


@pytest.mark.parametrize("package", ["jax", "scipy"])
def test_what_a_broken_package_leaves_unknown_is_not_broken_as_well(command, monkeypatch, package):
    failed = (False, "ImportError: no library")
    monkeypatch.setattr(_doctor, "imported", answers(**{package: failed, "devices": failed, "cuda": failed}))
    code, output, _ = command("doctor")
    assert code == 1
    assert f"devices of JAX     not known: {package} is broken\n" in output
    assert f"GPU of the engine  not known: {package} is broken\n" in output
    assert output.endswith("1 is broken\n")


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        ("F: Unknown flag in XLA_FLAGS: --bogus=1", "correct XLA_FLAGS"),
        ("no answer after 120 s", "set JAX_PLATFORMS=cpu to go without a GPU"),
    ],
)
def test_devices_that_do_not_answer_are_named_with_their_cure(command, monkeypatch, words, mend):
    monkeypatch.setattr(_doctor, "imported", answers(devices=(False, words)))
    _, output, _ = command("doctor")
    assert f"BROKEN: {words}; {mend}\n" in output
    assert output.endswith("1 is broken\n")


def test_an_old_version_is_broken_and_an_extra_may_be_missing(command, monkeypatch):
    versions = {"jax": "0.9.3", "torch": None}
    found = _doctor._version
    monkeypatch.setattr(_doctor, "imported", answers())
    monkeypatch.setattr(_doctor, "_version", lambda name: versions[name] if name in versions else found(name))
    code, output, _ = command("doctor")
    assert code == 1
    assert 'BROKEN: 0.9.3 is too old; pip install "jax>=0.10"\n' in output
    assert 'not installed; pip install "largeprompt[models]"\n' in output
