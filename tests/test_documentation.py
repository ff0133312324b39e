"""The documentation says what is so: the map of the paper, the README's examples, links, and the layers."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import largeprompt

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "largeprompt"

# The numbered items of the paper, in its own numbering.
STATEMENTS = """
Lemma 2.1, Proposition 3.1, Remark 3.2, Assumption 3.3, Proposition 3.4, Remark 4.1, Assumption 4.2, Theorem 4.3,
Assumption 5.1, Theorem 5.2, Remark 5.3, Lemma C.1, Lemma C.2, Corollary C.3, Lemma C.4, Assumption C.5, Lemma C.6,
Lemma C.7, Assumption C.8, Lemma C.9, Lemma D.1, Lemma D.2, Lemma E.1, Lemma E.2, Corollary E.3, Lemma E.4,
Corollary E.5, Lemma F.1
"""
EQUATIONS = (1, 2, 3, 4, 7, 10, *range(11, 30))
FIGURES = ("1a", "1b", "2", "3", "4", "5a", "5b", "6", "7", "8")
NUMBERED = (
    [item.strip() for item in STATEMENTS.replace("\n", " ").split(",")]
    + [f"({n})" for n in EQUATIONS]
    + [f"Figure {n}" for n in FIGURES]
)
# From the bottom up, as in ARCHITECTURE.md: a layer imports those before it.
LAYERS = ("measures", "attention", "icl", "dynamics", "engine", "concentration", "lab", "paper", "models", "cli")


def map_rows():
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| ?(.*?) ?\|$", (ROOT / "docs/paper-map.md").read_text(), re.M)
    return [row for row in rows if row[0] != "item"]


def test_every_numbered_item_of_the_paper_is_on_the_map_once():
    items = [item for item, *_ in map_rows() if not item.startswith("*")]
    assert sorted(items) == sorted(NUMBERED)


@pytest.mark.parametrize("row", map_rows(), ids=lambda row: row[0])
def test_the_home_and_the_test_of_an_item_exist(row):
    item, _, home, test = row
    if match := re.fullmatch(r"to come: (\w+)", home):
        assert match[1] in LAYERS
        assert test == "", f"{item} has no home yet, so its test cannot check it"
        return
    path = re.fullmatch(r"`largeprompt\.([\w.]+)`", home)
    assert path, f"{item}: {home}"
    found = largeprompt
    for name in path[1].split("."):
        found = getattr(found, name, None) or importlib.import_module(f"{found.__name__}.{name}")
    match = re.fullmatch(r"`(tests/[\w/]+\.py)::(\w+)`", test)
    assert match, f"{item}: {test}"
    functions = [
        node.name for node in ast.parse((ROOT / match[1]).read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    assert match[2] in functions


def test_links_between_pages_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([\w./-]*[./][\w./-]*)[)#]", page.read_text(), re.ASCII):
            made = page.parent.name == "api" and target == "cli.md"  # by the site
            assert made or (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("package", [*LAYERS[:-1], "concentration.bounds"])
def test_every_public_name_is_in_the_reference(package):
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    listed = re.findall(rf"^::: largeprompt\.{package}\.(\w+)$", pages, re.M)
    tree = ast.parse((SOURCE / package.replace(".", "/") / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    assert sorted(listed) == sorted(alias.asname for node in imports for alias in node.names if alias.asname)


def modules():
    return sorted(SOURCE.rglob("*.py"))


def layer_of(path: Path) -> str:
    part = path.relative_to(SOURCE).parts[0]
    return part.removesuffix(".py")


def imported_layers(source: str, package: tuple[str, ...]) -> set[str]:
    """The layers that a module inside `package` imports, however it writes it."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{origin}.{alias.name}" for alias in node.names]
    return {parts[1] for parts in (name.split(".") for name in names) if parts[0] == "largeprompt" and len(parts) > 1}


@pytest.mark.parametrize(
    "line", ["from largeprompt import attention", "import largeprompt.attention as a", "from ..attention import Head"]
)
def test_every_way_of_importing_is_seen(line):
    assert "attention" in imported_layers(line, ("largeprompt", "measures"))


def test_imports_point_down():
    for path in modules():
        layer = layer_of(path)
        if layer in LAYERS:
            package = ("largeprompt", *path.relative_to(SOURCE).parts[:-1])
            for other in imported_layers(path.read_text(), package) & set(LAYERS):
                assert LAYERS.index(other) <= LAYERS.index(layer), f"{path} imports {other}"


def test_every_folder_of_the_package_is_a_layer_of_the_architecture_page():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    for folder in SOURCE.iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"`{folder.name}/`" in page
            assert folder.name in LAYERS


def test_the_mathematics_never_prints_plots_or_touches_the_disk():
    for path in modules():
        if layer_of(path) in ("measures", "attention", "concentration"):
            tree = ast.parse(path.read_text())
            calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
            calls = {call.id for call in calls if isinstance(call, ast.Name)}
            assert not calls & {"print", "open"}, path
            assert "matplotlib" not in path.read_text(), path


def test_modules_are_short_enough_to_be_read():
    for path in modules():
        assert len(path.read_text().splitlines()) <= 400, path


def test_importing_the_package_does_not_choose_the_precision():
    """In a fresh interpreter, because this one has chosen."""
    show = "print(jax.config.jax_enable_x64)"
    code = f"import largeprompt, jax; {show}; largeprompt.use_float64(); {show}"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["False", "True"]


def test_what_type_checkers_see_of_the_package_is_what_is_imported_on_first_use():
    names, tree = [], ast.parse((SOURCE / "__init__.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                names.append(alias.asname)
                home = importlib.import_module(f"largeprompt.{node.module or alias.name}")
                assert getattr(largeprompt, alias.name) is (getattr(home, alias.name) if node.module else home)
    assert sorted(names) == sorted(largeprompt.__all__)
    assert set(names) < set(dir(largeprompt))
    with pytest.raises(AttributeError, match="has no attribute 'gaussian'"):
        largeprompt.gaussian  # noqa: B018  # pyrefly: ignore[missing-attribute]


def test_the_package_and_the_command_line_import_nothing_slow():
    """In a fresh interpreter: before that, no interrupt is heard."""
    code = "import sys, largeprompt.cli; print({'jax', 'numpy', 'typer', 'rich'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "set()\n"


def test_the_version_is_the_same_everywhere():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{largeprompt.__version__}"' in pyproject
    assert f"version: {largeprompt.__version__}" in (ROOT / "CITATION.cff").read_text()
