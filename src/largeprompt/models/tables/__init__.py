"""Tables as prompts: TabPFN v1 with weights on its rows. Needs PyTorch."""

from ._classifier import TabPFNClassifier as TabPFNClassifier
from ._csv import Table as Table
from ._csv import read_table as read_table
from ._intervals import InfluentialRows as InfluentialRows
from ._intervals import Intervals as Intervals
from ._members import Member as Member
from ._members import members_of as members_of
from ._network import TabPFN as TabPFN
from ._prompt import TablePrompt as TablePrompt
from ._prompt import log_odds as log_odds
from ._prompt import logits_of as logits_of
from ._study import RowsStudy as RowsStudy
from ._study import study_rows as study_rows
