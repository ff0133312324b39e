"""The executable paper: settings, figures, claims, errata, and the job that makes them all."""

from .job import Job as Job
from .job import Reproduction as Reproduction
from .job import figure as figure
from .job import job_of as job_of
from .job import kept_choice as kept_choice
from .job import reproduce as reproduce
from .job import settings_for as settings_for
from .job import verify as verify
from .job import write_report as write_report
from .plan import Listener as Listener
from .plan import Plan as Plan
from .settings import PRESETS as PRESETS
from .settings import Conventions as Conventions
from .settings import Settings as Settings
