from largeprompt.attention import AbstractLayer, softmax_form
from largeprompt.concentration._problem import Queries, RiskProblem, Tokens, problem_of
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
    problem = problem_of(layer, mu, nu, 1, quantity, query_in_prompt)
    if query_in_prompt:
        raise ValueError("query_in_prompt is True; the paper's bounds are for a query outside of its prompt")
    if isinstance(problem, RiskProblem):
        task = as_regression(problem.task)
        return (risk_bound if quantity == "risk" else risk_gradient_bound)(layer, task, L, form=form, log_L=log_L)
    tokens, queries = problem.mu, problem.nu
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
