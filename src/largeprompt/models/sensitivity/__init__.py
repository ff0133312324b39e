"""What outputs of a network rest on: weights on its prompt, influence, error bars. Needs PyTorch."""

from ._error_bars import ErrorBars as ErrorBars
from ._error_bars import error_bars as error_bars
from ._influence import Influence as Influence
from ._influence import influence as influence
from ._influence import left_out as left_out
from ._learning_curve import LearningCurve as LearningCurve
from ._learning_curve import learning_curve as learning_curve
from ._rows import RowsFor as RowsFor
from ._rows import rows_for as rows_for
from ._weighted import WeightedPrompt as WeightedPrompt
from ._weighted import weighted as weighted
