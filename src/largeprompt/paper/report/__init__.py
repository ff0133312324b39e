"""The report of a finished reproduction: a page that needs no network, and the same as text."""

from ._write import write as write
