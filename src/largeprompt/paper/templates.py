"""Templates of pages, kept as files beside the modules that fill them."""

import jinja2


def environment(package: str, html: bool) -> jinja2.Environment:
    """The templates of a package: a missing name is an error, and on HTML pages text is escaped."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package, ""),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
