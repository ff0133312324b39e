"""What callers may pass where the package will see numbers, a vector, or a batch of vectors."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import ArrayLike, Float

Numbers = ArrayLike | Sequence[Any]
VectorLike = Float[ArrayLike, " D"] | Sequence[float]
BatchLike = Float[ArrayLike, "n D"] | Sequence[Sequence[float]]
