"""What figures and claims are computed from besides training runs: measurements and exact values, each kept."""

from ._piece import AbstractPiece as AbstractPiece
from ._piece import Done as Done
from ._piece import Needed as Needed
from ._piece import Results as Results
from ._piece import Shelf as Shelf
from .errata import Errata as Errata
from .flow_limits import Descents as Descents
from .flow_limits import FlowLimits as FlowLimits
from .gaps import Gaps as Gaps
from .ladder import Ladder as Ladder
from .laws import Laws as Laws
from .laws import Weights as Weights
from .levels import Levels as Levels
from .limits import GaussianLimit as GaussianLimit
from .limits import LinearLimit as LinearLimit
from .limits import QueryInPrompt as QueryInPrompt
from .limits import TiltedMoments as TiltedMoments
from .population import Flow as Flow
from .population import InfiniteFlow as InfiniteFlow
from .population import squared_distance as squared_distance
from .speed import Speed as Speed
