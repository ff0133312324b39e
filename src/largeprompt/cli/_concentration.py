"""How near finite prompts are to their limit, for any law, layer and quantity; and how long a prompt must be."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._app import Json, Out, app, value, with_options
from ._output import device_for, print_result, ready, rows, written
from ._view import View

if TYPE_CHECKING:
    from largeprompt.lab import Study

Config = Annotated[Path | None, typer.Option(help="Settings in TOML, with any law as a table; options override them.")]
Where = Annotated[str, typer.Option("--device", help="Where prompts are drawn: auto, cpu or gpu.")]
_LAYER = {
    "measure": "Law of tokens: gaussian, rademacher, cube, sphere, a regression, or tokens in FILE.npy. [gaussian]",
    "sigma": "Covariance of tokens: identity, kms:RHO, FILE.npy ... [identity]",
    "d": "Dimension of tokens, of a regression that of covariates. [5]",
    "noise": "Variance of the label noise of a regression. [0.1]",
    "query_sigma": "Covariance of Gaussian queries. [queries like tokens]",
    "layer": "pytorch, pytorch:SEED, identity:SCALE, or weights in FILE.npz or FILE.npy. [pytorch]",
    "score_scale": "Factor of the scores of K and Q, such as 1/sqrt(16). [1]",
    "attention": "A kind: softmax, linear, sigmoid, relu ... [softmax]",
}
_PROMPTS = {
    "query_in_prompt": Annotated[
        bool | None, typer.Option("--query-in-prompt", help="Let the query be a token of its prompt.")
    ],
    "replicates": "Prompts a length. [1000]",
    "seed": "Seed of prompts and queries. [0]",
}
_STUDY = {
    **_LAYER,
    "L": "Prompt lengths: 10,100 or 10:50:10 or 10:100000:log. [10:10000:log]",
    "quantity": "output, gradient, U, V, K, Q, O; of a regression risk, risk-gradient. [the first two]",
    **_PROMPTS,
    "no_bounds": Annotated[bool | None, typer.Option("--no-bounds", help="Leave the paper's bounds out.")],
}


@app.command()
@with_options(_STUDY)
def concentration(
    *,
    config: Config = None,
    given: dict[str, Any],
    device: Where = "auto",
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Measure how far finite prompts are from the infinite one, beside the prediction and the paper's bounds."""
    study, place = _study(config, given), device_for(device, "jax")
    from largeprompt.paper.drawing import draw

    from ._charts import concentration_chart
    from ._tables import concentration_tables

    ready(out, "concentration")
    with View() as view:
        data = study.run(view, device=place)
    files = written(out, "concentration", draw(concentration_chart(data)), data)
    numbers = {"settings": data.attrs, "rows": rows(data, True), "quantities": rows(data, False)}
    print_result(as_json, numbers, concentration_tables(data), files, width=100)


@app.command("prompt-length")
@with_options({**_LAYER, "quantity": "As of concentration, but one. [output, or risk]", **_PROMPTS})
def prompt_length(
    *,
    epsilon: Annotated[str, typer.Option(help="The root mean square error that is asked for.")],
    config: Config = None,
    given: dict[str, Any],
    device: Where = "auto",
    as_json: Json = False,
) -> None:
    """The prompt length that brings a quantity within an error of its limit, measured there, beside the bound's."""
    study = _study(config, given, one=True)
    target, chosen = _positive("--epsilon", epsilon), study.quantities[0]
    if len(study.quantities) > 1:
        raise ValueError(f"quantity is {', '.join(study.quantities)}; a prompt length is of one, give --quantity")
    import jax

    from largeprompt.concentration import prompt_length_for
    from largeprompt.measures._worth import doubts

    from ._tables import prompt_length_lines

    subject = (study.attention, study.tokens, study.queries, chosen, jax.random.key(study.seed))
    options: Any = {
        "query_in_prompt": study.query_in_prompt,
        "replicates": study.replicates,
        "device": device_for(device, "jax"),
    }
    name = f"looking for the length of prompts, {chosen}"
    with View() as view, view.task(name, 1), doubts() as notes:
        found = prompt_length_for(target, *subject, **options)
    layer = {"layer": study.layer_in_words, "score_scale": getattr(study.attention, "scale", 1.0)}
    numbers = {
        "quantity": chosen,
        **{name: getattr(found, name) for name in _NUMBERS},
        "regime": found.regime.name,
        "sentence": found.regime.sentence,
        "notes": notes,
        "settings": {"toml": study.as_toml(), **layer},
    }
    print_result(as_json, numbers, prompt_length_lines(found, notes, study.layer_in_words))


_NUMBERS = (
    "epsilon", "L", "lasting", "method", "checked", "unchecked_reason", "measured", "measured_stderr", "bound_log10_L",
    "bound_refusal",
)  # fmt: skip


def _positive(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {text!r}; it must be a positive number")
    return number


def _study(config: Path | None, given: dict[str, Any], one: bool = False) -> "Study":
    """The study of a file and of options, which override it; of one quantity, where none is named."""
    from largeprompt import lab

    settings = lab.read_toml(config) if config is not None else {}
    settings |= {name: given[name] for name in ("L", "quantity", "query_in_prompt") if name in given}
    settings |= {name: value(given[name]) for name in ("replicates", "seed") if name in given}
    settings |= {"bounds": False} if "no_bounds" in given else {}
    settings["measure"] = table = _law(settings.get("measure"), given)
    is_task = isinstance(table, Mapping) and table.get("kind") == "regression"
    if one and "quantity" not in settings:
        settings["quantity"] = "risk" if is_task else "output"
    if "query_sigma" in given and not is_task:
        settings["query"] = {"kind": "gaussian", "cov": _covariance(given["query_sigma"], "query_sigma")}
    if {"layer", "attention", "score_scale"} & set(given) or "layer" not in settings:
        settings["layer"] = _layer(settings.get("layer"), given)
    return lab.study_from(settings, Path() if config is None else config.parent)


_KINDS = ("gaussian", "rademacher", "cube", "sphere", "regression")


def _law(table: Any, given: dict[str, Any]) -> Any:
    """The table of the law of tokens; a kind named on the command line stands for a whole table."""
    kind = given.get("measure")
    if kind is not None and kind.endswith((".npy", ".npz")):
        table, kind = {"kind": "empirical", "tokens": str(Path(kind).absolute())}, None
    if kind is not None and kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise ValueError(f"--measure is {kind!r}; it must be one of {known}, FILE.npy or FILE.npz, others by --config")
    fresh = kind is not None or table is None
    table = {"kind": kind or "gaussian"} if fresh else table
    if not isinstance(table, Mapping):
        return table  # refused with all other settings
    found, kind = dict(table), table.get("kind")
    covariance, size = ("sigma", "d") if kind == "regression" else ("cov", "dim")
    for name in ("sigma", "d"):
        if name in given and kind not in _KINDS:
            raise ValueError(f"--{name} is {given[name]!r}; a law of kind {kind!r} takes none")
    if "sigma" in given:
        found = {key: value for key, value in found.items() if key not in ("scale", "half_width", "radius")}
        found[covariance] = _covariance(given["sigma"], "sigma")
    if "d" in given or (fresh and isinstance(found.get(covariance, ""), str)):
        found[size] = value(given.get("d", "5"))
    if "noise" in given:
        if kind != "regression":
            raise ValueError(f"--noise is {given['noise']!r}; tokens of kind {kind!r} have no labels")
        found["noise"] = value(given["noise"])
    if "query_sigma" in given and kind == "regression":
        found["query_sigma"] = _covariance(given["query_sigma"], "query_sigma")
    return found


def _covariance(text: str, name: str) -> Any:
    """The name of a covariance, or the array of that name in a file."""
    from largeprompt import lab

    return lab.with_files({name: text})[name]


def _layer(table: Any, given: dict[str, Any]) -> Any:
    text = given.get("layer")
    if text is not None or table is None:
        kind, _, argument = (text or "pytorch").partition(":")
        if text is not None and text.endswith((".npz", ".npy")):
            table = {"file": str(Path(text).absolute())}
        elif kind == "pytorch":
            table = {"init": "pytorch", "seed": value(argument or "0")}
        elif kind == "identity" and argument:
            table = {"init": "identity", "scale": value(argument)}
        else:
            raise ValueError(
                f"--layer is {text!r}; it must be pytorch, pytorch:SEED, identity:SCALE, FILE.npz or FILE.npy"
            )
    if not isinstance(table, Mapping):
        return table  # refused with all other settings
    kind = {"kind": given["attention"]} if "attention" in given else {}
    scale = {"scale": _factor("--score-scale", given["score_scale"])} if "score_scale" in given else {}
    if scale and table.get("init") == "identity":
        raise ValueError(f"--score-scale is {given['score_scale']!r}; identity:SCALE holds the scale already")
    return {**table, **kind, **scale}


def _factor(name: str, text: str) -> float:
    """A number, or one over a root: 0.25, 1/16, 1/sqrt(16)."""
    above, _, below = text.replace(" ", "").partition("/")
    root = below.startswith("sqrt(") and below.endswith(")")
    try:
        number = float(above) / (math.sqrt(float(below[5:-1])) if root else float(below or 1))
    except (ValueError, ZeroDivisionError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {text!r}; it must be a number, such as 0.25 or 1/sqrt(16)")
    return number
