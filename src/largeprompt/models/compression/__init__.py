"""A long prompt as a short measure: keys and values of a network compressed."""

from ._cache import CompressedCache as CompressedCache
