"""What the documentation site makes while it is built: formulas, the pages of the repository's root, the command line.

Formulas become MathML, which browsers set themselves: no script, nothing fetched, text that can be copied and read out.
A formula that is not LaTeX stops the build. The font comes from an installed package, cut down to what formulas use.
"""

import html
import io
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import griffe
from fontTools import subset
from fontTools.ttLib import TTFont
from math_core import LatexToMathML
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)
DISPLAYED = re.compile(r"\s*(\$\$.+?\$\$)\s*", re.S)
NO_LINK = re.compile(r'<a href="([^".#:]{1,4})">(.*?)</a>')
# Latin, Greek, punctuation, sub- and superscripts, letter-like symbols, arrows, operators, mathematical alphabets
CHARACTERS = ((0x20, 0x250), (0x300, 0x400), (0x2000, 0x2400), (0x27C0, 0x2800), (0x2980, 0x2B00), (0x1D400, 0x1D800))

_converter = LatexToMathML(fancy_error=False)


def on_files(files, config):
    """Add what is made."""
    for name, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text().replace("](docs/", "](")))
    files.append(File.generated(config, "api/cli.md", content=command_line()))
    files.append(File.generated(config, "assets/math.woff", content=font()))
    return files


def on_page_markdown(markdown, page, **_):
    """Links to pages of the root lead to their copies on the site."""
    up = "../" * page.file.src_uri.count("/")
    for name, copy in FROM_ROOT.items():
        markdown = re.sub(rf"\]\((\.\./)*{re.escape(name)}", f"]({up}{copy}", markdown)
    return markdown


def on_page_content(content, page, **_):
    """Set the formulas; what looks like a link to z is T[μ](z)."""

    def mathml(found: re.Match) -> str:
        latex, displayed = html.unescape(found[3]).strip(), found[2] == "["
        try:
            formula = _converter.convert_with_local_state(latex, displaystyle=displayed)
        except Exception as error:
            raise SystemExit(f"{page.file.src_uri}: {latex!r} is not a formula: {error}") from None
        return f'<div class="formula">{formula}</div>' if displayed else formula

    return NO_LINK.sub(r"[\2](\1)", FORMULA.sub(mathml, content))


class Docstrings(griffe.Extension):
    """Displayed formulas stand apart, and records have their fields as signature: they are made from them."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = DISPLAYED.sub(r"\n\n\1\n\n", obj.docstring.value).strip()

    def on_class_members(self, *, cls, **_):
        fields = [each for each in cls.attributes.values() if each.annotation and not each.has_labels("property")]
        if not fields or "__init__" in cls.members or not {"eqx.Module", "NamedTuple"} & {*map(str, cls.bases)}:
            return
        either = griffe.ParameterKind.positional_or_keyword
        parameters = [
            griffe.Parameter(each.name, annotation=each.annotation, kind=either, default=_default(each.value))
            for each in fields
        ]
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters)))


def _default(value):
    """Of a field; `eqx.field(static=True, default=x)` has x."""
    if not str(value).startswith("eqx.field"):
        return value
    found = re.search(r"default=(.+)\)$", str(value))
    return found[1] if found else None


def command_line() -> str:
    """The reference of the command line, as its own library writes it."""
    command = [sys.executable, "-m", "typer", "largeprompt.cli._commands", "utils", "docs", "--name", "largeprompt"]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return made.replace("# `largeprompt`", "# Command line", 1)


def font() -> bytes:
    """STIX Two Math (Open Font License)."""
    with resources.as_file(resources.files("ziamath.fonts") / "STIXTwoMath-Regular.ttf") as path:
        whole = TTFont(path)
    options = subset.Options(flavor="woff", notdef_outline=True, layout_features=["*"])
    cut = subset.Subsetter(options)
    cut.populate(unicodes=[code for first, end in CHARACTERS for code in range(first, end)])
    cut.subset(whole)
    whole.flavor = "woff"
    written = io.BytesIO()
    whole.save(written)
    return written.getvalue()
