"""Pages that need no network: templates kept beside the modules that fill them, one style and one script for all."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2


def environment(package: str, html: bool) -> jinja2.Environment:
    """The templates of a package: a missing name is an error, and on HTML pages text is escaped."""
    return jinja2.Environment(
        # its own, and the frame of all pages
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name, "") for name in (package, __name__)]),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def embedded(
    package: str, style: str | Sequence[str], script: str | Sequence[str] | None = None, data: Any = None
) -> dict[str, Any]:
    """What a page holds besides its text: style and script, those of all pages and these files, Plotly, and its data.

    Nothing can be fetched, and no script runs but these two. A page without a script of its own draws nothing, and
    has no Plotly.
    """
    plotly, own = "", _files(__name__, "page.js")
    if script is not None:
        from plotly.offline import get_plotlyjs

        plotly, own = get_plotlyjs(), own + _files(package, script)
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (plotly, own))
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return {
        "policy": f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:",
        "style": _files(__name__, "page.css") + _files(package, style),
        "plotly": plotly,
        "script": own,
        # A script element ends at the first "</", whatever the JSON around it means.
        "data": text.replace("</", "<\\/").replace("<!--", "<\\u0021--"),
    }


def _files(package: str, names: str | Sequence[str]) -> str:
    """One file of a package, or several one after the other."""
    folder = resources.files(package)
    several = [names] if isinstance(names, str) else names
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in several)
