"""What attention is trained for: tasks, and the risks of a layer on them."""

from ._covariances import diagonal as diagonal
from ._covariances import identity as identity
from ._covariances import kms as kms
from ._covariances import spiked as spiked
from ._estimate import Estimate as Estimate
from ._estimate import Gradient as Gradient
from ._regression import LinearRegression as LinearRegression
from ._regression import RegressionOn as RegressionOn
from ._task import AbstractTask as AbstractTask
from ._task import Instance as Instance
from ._task import WithLoss as WithLoss
