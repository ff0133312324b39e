"""Beartype as the run-time checker of every signature, an int being welcome where a float is asked for (PEP 484)."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
