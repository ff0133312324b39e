"""The ledger: every testable claim of the paper with what is measured for it, and a verdict by one rule."""

from . import _flow_limits, _initialisation, _ladder, _limits, _paths, _rates, _trained
from ._claim import ERRORS as ERRORS
from ._claim import RULE as RULE
from ._claim import VERDICTS as VERDICTS
from ._claim import Check as Check
from ._claim import Claim as Claim
from ._claim import Finding as Finding
from ._claim import not_settled as not_settled
from ._errata import entries as entries
from ._roles import ROLES as ROLES
from ._roles import Role as Role
from ._roles import counted as counted
from ._roles import role_in_words as role_in_words
from ._statistics import mean_of_counts as mean_of_counts
from ._statistics import mean_over_seeds as mean_over_seeds

_MODULES = (_initialisation, _trained, _paths, _limits, _rates, _ladder, _flow_limits)
CLAIMS: dict[str, Claim] = {
    claim.key: claim
    for claim in sorted(
        (claim for module in _MODULES for claim in module.CLAIMS), key=lambda claim: (claim.key[0], int(claim.key[1:]))
    )
}
"""By key: C1 … are what the figures are said to show, T1 … what the theory says."""
