"""The page docs/errata.md, as text."""

from collections.abc import Mapping, Sequence
from inspect import cleandoc

from largeprompt.paper.errata._concentration import ONE_TERM_BOUND
from largeprompt.paper.errata._erratum import Comparison, Erratum, Evidence

OPENING = """
    # Errata

    Places of *Softmax as Linear Attention in the Large-Prompt Regime* (Boursier and Boyer, arXiv
    2512.11784v2) that are not right or not complete as printed, each with its correction and with numbers
    that decide between the two. The theorems survive: Eq. (1) needs L ≥ 2 (E6), Theorem 4.3 a stronger moment (E4), and
    Theorem 5.2 nothing new. All numbers are computed, by closed forms and fixed nodes:
    `pytest tests/paper/test_errata.py` recomputes them and fails if a comparison does not hold or this page
    is out of date, and

    ```sh
    python -c "import largeprompt as lp; lp.use_float64()
    from largeprompt.paper.errata import evidence, markdown; print(markdown(evidence()), end='')"
    ```

    prints the page again.

    An **error** is a false statement, a **gap** a missing step or hypothesis (the statement itself may be
    true), a **typo** a slip of the pen.
    Notation is the paper's; d is the token dimension in Appendices C to E and the covariate dimension in
    Sections 5 and 6. Norms of matrices are operator norms unless marked F, s2 is the variance of the label
    noise, U = [[A, ·], [cᵀ, ·]] and the last row of V is v = (p, r). Numbers have four digits; those below
    10⁻¹⁰ in size are shown as 0.
"""


def prose(text: str) -> str:
    """Unwrapped paragraphs."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in cleandoc(text).split("\n\n"))


def _row(role: str, comparison: Comparison) -> str:
    relation = comparison.relation.replace("<", "&lt;").replace(">", "&gt;")
    # What is compared with zero is a residue of rounding: its digits belong to the machine, not to the page.
    x = 0.0 if comparison.relation == "=" and comparison.y == 0 and comparison.holds else comparison.x
    cells = (role, comparison.left, f"{x:.4g}", relation, f"{comparison.y:.4g}", comparison.right)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _section(erratum: Erratum, evidence: Evidence) -> str:
    reason, against, repair = erratum.HEADINGS[erratum.kind]
    rows = [_row(against, comparison) for comparison in evidence.against]
    rows += [_row(repair, comparison) for comparison in evidence.repair]
    return "\n\n".join(
        (
            f"## {erratum.key}",
            f"*{erratum.kind.capitalize()}. {erratum.place}.*",
            f"**Printed.** {prose(erratum.printed)}",
            f"**{reason}.** {prose(erratum.why)}",
            f"**Right.** {prose(erratum.correction)}",
            f"**Numbers.** {prose(evidence.setting)}",
            "\n".join(
                (
                    "| | quantity | value | | value | quantity |",
                    "|---|---|---:|:-:|:---|---|",
                    *rows,
                )
            ),
        )
    )


def render(errata: Sequence[Erratum], evidence_by_key: Mapping[str, Evidence]) -> str:
    """The whole page: opening, table, the bound shared by four entries, one section each."""
    table = ["| | kind | place | what |", "|---|---|---|---|"]
    table += [f"| [{e.key}](#{e.key.lower()}) | {e.kind} | {e.place} | {e.summary} |" for e in errata]
    bound = "## One bound in place of Lemmas C.1, C.3 and C.4\n\n" + cleandoc(ONE_TERM_BOUND)
    sections = (_section(erratum, evidence_by_key[erratum.key]) for erratum in errata)
    page = "\n\n".join((cleandoc(OPENING), "\n".join(table), bound, *sections)) + "\n"
    return page.replace("[μ](", "\\[μ](")  # not a link
