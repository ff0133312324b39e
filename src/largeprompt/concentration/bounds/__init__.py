"""Every bound of Section 3 and of Appendices C, D and E, with its constants, corrected where the paper slips."""

from ._bound import Bound as Bound
from ._fixed_query import corollary_c3 as corollary_c3
from ._fixed_query import lemma_c1 as lemma_c1
from ._fixed_query import lemma_c2 as lemma_c2
from ._fixed_query import lemma_c4 as lemma_c4
from ._fixed_query import lemma_c7 as lemma_c7
from ._fixed_query import one_term as one_term
from ._layers import Quantity as Quantity
from ._layers import bound as bound
from ._layers import gradient_bounds as gradient_bounds
from ._layers import one_term_over_queries as one_term_over_queries
from ._layers import output_bound as output_bound
from ._lengths import length_for as length_for
from ._maxima import lemma_d1 as lemma_d1
from ._maxima import lemma_d1_output as lemma_d1_output
from ._maxima import lemma_d2_maximum as lemma_d2_maximum
from ._maxima import lemma_d2_tail as lemma_d2_tail
from ._moments import MomentConstants as MomentConstants
from ._moments import moment_constants as moment_constants
from ._over_queries import Form as Form
from ._over_queries import lemma_c6 as lemma_c6
from ._over_queries import lemma_c9 as lemma_c9
from ._over_queries import product_bound as product_bound
