"""The same training, in law, far faster: counter-based random numbers, exact low-dimensional sampling, one kernel."""

from ._choice import trainer_for as trainer_for
from ._fused import FusedTrainer as FusedTrainer
from ._gpu import GpuBatch as GpuBatch
from ._gpu import GpuRun as GpuRun
from ._gpu import GpuTrainer as GpuTrainer
from ._gpu import Segment as Segment
from ._prompt_sums import gaussian_prompt_sums as gaussian_prompt_sums
from ._prompt_sums import sum_count as sum_count
from ._training_arrays import refusal as refusal
