"""Which parts of a context carry a model's answer: from texts to an attribution."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from largeprompt import _checks as checks
from largeprompt._progress import Progress
from largeprompt.models._load import check_tokens

from ._ablations import ablations
from ._attribution import Attribution
from ._estimators import LEAST, METHODS, Method, estimate
from ._prompt import KINDS, ContextPrompt, Kind
from ._text import ContextText, answer_ids, generated, read
from ._units import UNITS, Unit

_ANSWER = 64  # tokens of an answer that the model itself gives


def attribute(
    model: Any,
    tokenizer: Any,
    context: str | Sequence[str],
    question: str | None,
    answer: str | None = None,
    *,
    budget: int = 32,
    unit: Unit = "sentences",
    kind: Kind = "masked",
    method: Method = "auto",
    plain: bool = False,
    seed: int = 0,
    batch: int = 8,
    progress: Progress | None = None,
) -> Attribution:
    r"""What each part of a context adds to the log-probability of an answer.

    `context` is a text, or several (documents). Without an answer, the model's own is taken, the likeliest token each
    time. The question is put in the tokenizer's template where there is one, unless `plain`; without a question the
    answer is what goes on from the context. `budget` is the number of forward passes, a backward pass counted as two,
    besides one for the answer itself.

    The scores are coefficients of a linear prediction of $\log p$ from which parts are there, over random halves of the
    context. `kind` says what it is not to be there: "masked", no token reads the part; "taken out", the text is
    shortened. `method` "auto" combines gradients and ablations (`docs/contexts.md`); others are there to compare.
    """
    for name, given, known in (("unit", unit, UNITS), ("kind", kind, KINDS), ("method", method, METHODS)):
        if given not in known:
            raise ValueError(f"{name} is {given!r}; it must be one of {', '.join(known)}")
    budget, batch = checks.count("budget", budget, at_least=LEAST), checks.count("batch", batch)
    if tokenizer is None:
        raise ValueError("there is no tokenizer; a context is read as text")
    text = answered(model, tokenizer, read(tokenizer, context, question, unit, plain), answer)
    prompt = ContextPrompt(model, torch.as_tensor(text.ids), torch.as_tensor(text.group), text.answer, kind)
    with (progress or Progress()).task("attributing", budget + 1) as advance:
        (whole,) = ablations(prompt, np.ones((1, prompt.groups), bool), advance=advance)
        found = estimate(prompt, method, budget, seed=seed, batch=batch, advance=advance)
    return Attribution(
        parts=tuple(text.parts),
        scores=found.coefficients,
        stderr=found.stderr,
        tokens=np.bincount(text.group[text.group >= 0], minlength=len(text.parts)),
        log_probability=float(whole),
        fit=found.fit,
        question=question,
        answer=tokenizer.decode(text.ids[-text.answer :].tolist()),
        unit=unit,
        kind=kind,
        method=method,
        passes=prompt.passes,
    )


def answered(model: Any, tokenizer: Any, text: ContextText, answer: str | None) -> ContextText:
    """The prompt with an answer, given or the model's own, once the model has positions for all of it."""
    name = type(model).__name__
    check_tokens(name, model, text.ids, "the context with its question")
    ids = generated(model, tokenizer, text, _ANSWER) if answer is None else answer_ids(tokenizer, answer, text.joint)
    found = text.answered(ids)
    check_tokens(name, model, found.ids, "the context with question and answer")
    return found
