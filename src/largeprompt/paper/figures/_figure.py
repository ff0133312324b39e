import dataclasses

import xarray as xr

from largeprompt.paper.chart import Chart
from largeprompt.paper.pieces import Needed, Results
from largeprompt.paper.settings import ISOTROPIC, Settings


@dataclasses.dataclass(frozen=True)
class AbstractFigure:
    """A figure as a description: what it needs, how that becomes a dataset, how the dataset is drawn and told.

    The figure of the anisotropic experiment is the same description with another `covariance`.
    """

    key: str
    covariance: str = ISOTROPIC

    @property
    def name(self) -> str:
        """As the report and the command line call it."""
        return f"Figure {self.key}"

    @property
    def title(self) -> str:
        """What it shows, in a line."""
        raise NotImplementedError

    @property
    def look(self) -> str:
        """What a reader should look for, in a sentence or two."""
        raise NotImplementedError

    def needs(self, settings: Settings) -> tuple[Needed, ...]:
        """The training runs and pieces that it is made from."""
        raise NotImplementedError

    def dataset(self, settings: Settings, results: Results) -> xr.Dataset:
        """All that is drawn, labelled."""
        raise NotImplementedError

    def chart(self, data: xr.Dataset) -> Chart:
        """How it is drawn."""
        raise NotImplementedError

    def told(self, data: xr.Dataset) -> list[str]:
        """Its main numbers, a sentence each."""
        raise NotImplementedError
