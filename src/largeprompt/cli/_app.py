"""The application, its two streams, and the options that several commands have, with their values."""

import functools
import inspect
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from largeprompt import __version__


class _Command(TyperCommand):
    """A command that computes: JAX is set up once the options are read, so that help and misspelt options are quick."""

    def invoke(self, ctx: Any) -> Any:
        # NumPy's matrices are small: threads would only wait, on cores that other work could have. On other processors
        # than these PyTorch has its linear algebra from the same library, and large matrices.
        if platform.machine() in ("x86_64", "AMD64"):
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        from largeprompt import _compiled, use_float64  # imports JAX

        from ._output import in_one_line, remark

        _compiled.compile_quickly()
        try:
            _compiled.keep_compiled(_compiled.cache_folder())
        except OSError as error:
            remark(f"compiled programs are not kept: {in_one_line(error)}; {_compiled.VARIABLE}=FOLDER or off")
        use_float64()
        return super().invoke(ctx)


class Commands(typer.Typer):
    """A group of commands that compute."""

    def command(self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **options: Any) -> Any:
        return super().command(name, cls=cls or _Command, **options)


app = Commands(
    help="Attention as a map on measures: finite prompts, their limit, and how fast one reaches the other.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# no emoji: a length of 10:100:10 is no place for one
screen, errors = Console(emoji=False), Console(stderr=True, emoji=False)

Json = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON instead of tables.")]
Out = Annotated[Path, typer.Option(help="Folder for figures and data.")]
DeviceName = Annotated[
    str, typer.Option("--device", help="auto, cpu or gpu: without a GPU, the CPU does it and a line says so.")
]
Sigma = Annotated[str, typer.Option(help="Covariance: identity, kms:RHO, spiked:SIZE, diagonal:A,B,...")]
Dimension = Annotated[int, typer.Option("--d", help="Dimension of the covariates.")]
Noise = Annotated[float, typer.Option(help="Variance of the label noise.")]
Lengths = Annotated[str, typer.Option("--L", help="Prompt lengths: 10,100,1e3 or 10:50:10 or 10:1000:log.")]


def with_options(options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Options in place of a command's parameter `given`, which holds those that a user gave, by name.

    An option is its help, with its default as the last words in brackets: the settings know it, the command line does
    not. It is given as text, unless a type stands in place of the help.
    """

    def decorator(command: Callable[..., None]) -> Callable[..., None]:
        own = {name: _as_type(name, option) for name, option in options.items()}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            added = [parameter.replace(name=name, default=None, annotation=own[name]) for name in own]
            parameters += added if parameter.name == "given" else [parameter]

        @functools.wraps(command)
        def call(**values: Any) -> None:
            found = {name: values.pop(name) for name in options}
            command(given={name: value for name, value in found.items() if value is not None}, **values)

        call.__signature__ = inspect.Signature(parameters)  # pyrefly: ignore[missing-attribute]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorator


def _as_type(name: str, option: Any) -> Any:
    if not isinstance(option, str):
        return option
    text, _, default = option.removesuffix("]").rpartition(" [")
    flag = f"--{name.replace('_', '-')}"
    return Annotated[str | None, typer.Option(flag, help=text or option, show_default=default if text else False)]


def value(text: str) -> Any:
    """A number where it is one, else the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
