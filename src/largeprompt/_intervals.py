import math


def wilson(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share, by default at 95 %; of nothing, anything."""
    if total == 0:
        return 0.0, 1.0
    share, weight = count / total, z * z / total
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / total + weight / (4 * total))
    return (0.0 if count == 0 else centre - half), (1.0 if count == total else centre + half)
