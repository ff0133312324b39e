"""Several layers of a cache as one batch, so that they are compressed together and not one after another."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ._atoms import FITTED, Layer
from ._future import PIECE, Future, Rotation, replayed
from ._stored import StoredLayer

_AT_ONCE = 2**28  # weights of a fit that are held at a time; on a GPU, one for 32 bytes of its free memory


class Stack:
    """Stored layers of one shape as one; those with fewer tokens begin with hidden ones, as padded prompts do."""

    def __init__(self, layers: Mapping[int, StoredLayer], roots: Tensor, rotate: Rotation | None, length: int):
        self.numbers, self.layers = list(layers), list(layers.values())
        self.batch = self.layers[0].keys.shape[0]
        self._roots = roots if len(layers) == 1 else roots.repeat_interleave(self.batch, dim=0)
        self._rotate, self._length = rotate, length
        self._future: Future | None = None

    def problem(self) -> Layer:
        """Prompts (layers · b, G, L) and the law of their queries; of both, the law is kept for the next time."""
        parts = zip(*(layer.whole() for layer in self.layers), strict=True)
        keys, values, log_weights = (torch.cat(self._padded(part)) for part in parts)
        for row, layer in enumerate(self.layers):
            log_weights[self.batch * row : self.batch * (row + 1), :, : self._length - layer.width] = -math.inf
        scale = self.layers[0].scale
        if self._future is None:
            self._future = self._replayed(keys, values, scale)
        return Layer(keys, values, log_weights, scale, self._future, self._roots)

    def _padded(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors (b, G, used, …) with as many tokens each."""
        made = []
        for x in tensors:
            missing = self._length - x.shape[2]
            made.append(torch.cat([x.new_zeros(*x.shape[:2], missing, *x.shape[3:]), x], dim=2) if missing else x)
        return made

    def _replayed(self, keys: Tensor, values: Tensor, scale: float) -> Future:
        parts = zip(*(layer.segments() for layer in self.layers), strict=True)
        segments = [part[0]._replace(queries=torch.cat([each.queries for each in part])) for part in parts]
        hidden = None
        if any(layer.hidden is not None for layer in self.layers):
            hidden = torch.zeros(keys.shape[0], self._length, dtype=torch.bool, device=keys.device)
            for row, layer in enumerate(self.layers):
                if layer.hidden is not None:
                    begin = self._length - layer.fresh
                    place = slice(begin, begin + layer.hidden.shape[1])
                    hidden[self.batch * row : self.batch * (row + 1), place] = layer.hidden
        return replayed(segments, keys, values, hidden, scale, self._rotate)

    def worth(self, found: Tensor) -> Tensor:
        """What tokens are worth, (layers, b, G, L): with what atoms were before, and −∞ where a layer has no token."""
        found = found.reshape(len(self.layers), self.batch, *found.shape[1:])
        for row, layer in enumerate(self.layers):
            begin = self._length - layer.width
            found[row, ..., :begin] = -math.inf
            if layer.worth is not None:
                found[row, ..., begin:] = layer.worth_with(found[row, ..., begin:])
        return found

    def alone(self, problem: Layer, row: int) -> Layer:
        """One layer of a problem, without padding."""
        rows, begin = slice(self.batch * row, self.batch * (row + 1)), self._length - self.layers[row].width
        keys, values, log_weights = (x[rows, :, begin:] for x in problem[:3])
        roots = problem.roots if len(self.layers) == 1 else problem.roots[rows]
        return Layer(keys, values, log_weights, problem.scale, Future(*(x[rows] for x in problem.future)), roots)


def alike(layers: Mapping[int, StoredLayer], alone: bool, fit: bool) -> Iterator[dict[int, StoredLayer]]:
    """Layers that fit into one stack, as many as memory allows; each by itself if `alone`."""
    kinds: dict[tuple, dict[int, StoredLayer]] = {}
    for number, layer in layers.items():
        segments = tuple((s.queries.shape, s.length, s.step) for s in layer.segments())
        shape = (*layer.keys.shape[:2], layer.keys.shape[3], layer.values.shape[3])
        kind = (number if alone else 0, shape, layer.scale, layer.keys.device, layer.keys.dtype, segments)
        kinds.setdefault(kind, {})[number] = layer
    for kind in kinds.values():
        first = next(iter(kind.values()))
        (b, G), width = first.keys.shape[:2], max(layer.width for layer in kind.values())
        queries = sum(segment.queries[0, :, :, 0].numel() for segment in first.segments())
        held = b * G * max(FITTED, width) * width if fit else b * queries * PIECE
        most = max(1, _at_once(first.keys.device) // held)
        numbers = list(kind)
        for begin in range(0, len(numbers), most):
            yield {number: kind[number] for number in numbers[begin : begin + most]}


def _at_once(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] // 32 if device.type == "cuda" else _AT_ONCE
