"""How a layer learns: gradient flow at any prompt length, its conserved quantities and its known limits."""

from ._attention_flow import AttentionFlow as AttentionFlow
from ._attention_flow import attention_flow as attention_flow
from ._attention_flow import time_to_attend as time_to_attend
from ._conserved import conserved_quantities as conserved_quantities
from ._flow import Trajectory as Trajectory
from ._flow import gradient_flow as gradient_flow
from ._ladder import Ladder as Ladder
from ._ladder import flow_ladder as flow_ladder
from ._limits import flow_limit as flow_limit
from ._optimiser import SGD as SGD
from ._optimiser import AbstractOptimiser as AbstractOptimiser
from ._optimiser import Adam as Adam
from ._optimiser import Momentum as Momentum
from ._optimiser import optimiser_named as optimiser_named
from ._sgd import FAR as FAR
from ._sgd import AbstractTrainer as AbstractTrainer
from ._sgd import Layers as Layers
from ._sgd import ReferenceTrainer as ReferenceTrainer
from ._sgd import State as State
from ._sgd import Training as Training
from ._shares import StartShares as StartShares
from ._shares import start_shares as start_shares
from ._start import alpha_range as alpha_range
from ._start import structured_start as structured_start
