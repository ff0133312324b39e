"""How near a finite prompt is to its limit: measured and predicted."""

from ._asymptotics import Rates as Rates
from ._asymptotics import output_bias as output_bias
from ._asymptotics import output_covariance as output_covariance
from ._asymptotics import rates as rates
from ._deviation import Deviation as Deviation
from ._deviation import deviation as deviation
from ._fit import RateFit as RateFit
from ._quantities import QUANTITIES as QUANTITIES
