"""The executable paper: experiments, claims, errata, and the job that makes them all."""

from .choice import PRESETS as PRESETS
from .choice import Choice as Choice
from .choice import Conventions as Conventions
from .choice import Protocol as Protocol
from .job import Job as Job
from .job import figure as figure
from .job import kept_choice as kept_choice
from .job import reproduce as reproduce
from .job import verify as verify
from .job import write_report as write_report
from .plan import Plan as Plan
from .reproduction import Reproduction as Reproduction
