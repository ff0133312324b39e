"""What a prompt is: a probability measure on tokens, finite or not."""

from ._affine import Affine as Affine
from ._cube import Cube as Cube
from ._empirical import Empirical as Empirical
from ._expectation import Expectation as Expectation
from ._from_cgf import FromCGF as FromCGF
from ._from_sampler import FromSampler as FromSampler
from ._gaussian import Gaussian as Gaussian
from ._measure import AbstractMeasure as AbstractMeasure
from ._measure import as_measure as as_measure
from ._mixture import Mixture as Mixture
from ._product import Product as Product
from ._rademacher import Rademacher as Rademacher
from ._sphere import Sphere as Sphere
from ._worth import DoubtWarning as DoubtWarning
from ._worth import FewTokensWarning as FewTokensWarning
