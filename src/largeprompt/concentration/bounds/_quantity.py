from largeprompt.attention import AbstractLayer, softmax_form
from largeprompt.concentration._quantities import OF_RISK, QUANTITIES, Queries, Tokens, known_names, laws, task_of
from largeprompt.icl import as_regression

from ._bound import Bound, Length, Number, bound_of
from ._layers import gradient_bounds, output_bound
from ._over_queries import Form
from ._risks import risk_bound, risk_gradient_bound


def bound(
    layer: AbstractLayer,
    mu: Tokens,
    nu: Queries = None,
    L: Length = None,
    quantity: str = "output",
    *,
    query_in_prompt: bool = False,
    form: Form = "printed",
    log_L: Number | None = None,
) -> Bound:
    r"""The paper's bound on what `deviation` measures and `predict` predicts: Propositions 3.1 and 3.4.

    Of a task in place of `mu`, the bound is on the gap itself and not on its square, $|R_L-R_\infty|$ or
    $\|\nabla R_L-\nabla R_\infty\|$: Lemmas E.2 and E.4.
    """
    if quantity not in QUANTITIES:
        raise ValueError(f"quantity is {quantity!r}; it must be one of {known_names()}")
    if query_in_prompt:
        raise ValueError("query_in_prompt is True; the paper's bounds are for a query outside of its prompt")
    if quantity in OF_RISK:
        task = as_regression(task_of(layer, mu, nu))
        return (risk_bound if quantity == "risk" else risk_gradient_bound)(layer, task, L, form=form, log_L=log_L)
    _, tokens, queries = laws(layer, mu, nu)
    if quantity == "output":
        return output_bound(layer, tokens, queries, L, form=form, log_L=log_L)
    if quantity == "U":
        return gradient_bounds(softmax_form(layer), tokens, queries, L, form=form, log_L=log_L)["U"]
    parts = gradient_bounds(layer, tokens, queries, L, form=form, log_L=log_L)
    if quantity == "gradient":
        notes = dict.fromkeys(note for part in parts.values() for note in part.assumptions)
        return bound_of("Proposition 3.4", {name: part.log for name, part in parts.items()}, notes)
    if quantity not in parts:
        raise ValueError(f"quantity is {quantity!r}; this layer's own parameters are {', '.join(parts)}")
    return parts[quantity]
