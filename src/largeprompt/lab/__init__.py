"""Runs as data: what goes to disk, and how."""

from ._files import replacing as replacing
