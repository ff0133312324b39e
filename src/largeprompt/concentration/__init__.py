"""How near a finite prompt is to its limit: measured, predicted and bounded."""

from . import bounds as bounds
from ._comparison import Comparison as Comparison
from ._comparison import compare as compare
from ._deviation import Deviation as Deviation
from ._deviation import deviation as deviation
from ._fit import RateFit as RateFit
from ._fit import fit_power_law as fit_power_law
from ._length import PromptLength as PromptLength
from ._length import prompt_length_for as prompt_length_for
from ._prediction import Prediction as Prediction
from ._prediction import predict as predict
from ._problem import OF_RISK as OF_RISK
from ._problem import QUANTITIES as QUANTITIES
from ._rates import Rates as Rates
from ._rates import output_bias as output_bias
from ._rates import output_covariance as output_covariance
from ._rates import rates as rates
from ._regime import Regime as Regime
from ._regime import breakdown_exponent as breakdown_exponent
from ._regime import spread as spread
