from collections.abc import Mapping
from pathlib import Path

from largeprompt.lab import replacing
from largeprompt.paper.figures import FIGURES, AbstractFigure
from largeprompt.paper.report._finished import read
from largeprompt.paper.report._markdown import markdown
from largeprompt.paper.report._page import page


def write(folder: Path | str, figures: Mapping[str, AbstractFigure] = FIGURES) -> list[Path]:
    """Write the report of a finished reproduction into its folder; give its files, the page and the same as text."""
    found = read(Path(folder), figures)
    home = Path(folder) / "report"
    home.mkdir(exist_ok=True)
    paths = []
    for name, text in (("index.html", page(found)), ("report.md", markdown(found))):
        with replacing(home / name) as path:
            path.write_text(text, encoding="utf-8", newline="\n")
        paths.append(home / name)
    return paths
