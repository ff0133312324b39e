"""A prompt for small models in tests of commands, and JSON as a strict reader takes it."""

import json
from typing import Any

TEXT = " ".join(f"w{(i * i + 3 * i // 2) % 40}" for i in range(100))


def strict(text: str) -> Any:
    """JSON without NaN and Infinity, which are not JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)
