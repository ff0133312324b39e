"""Names that several figures and claims share."""

from largeprompt.paper.settings import ANISOTROPIC, ISOTROPIC

_NAMES = {ISOTROPIC: "isotropic covariates", ANISOTROPIC: "anisotropic covariates, Σᵢⱼ = 0.5^|i−j|"}


def covariates(covariance: str) -> str:
    """A covariance in words."""
    return _NAMES.get(covariance, f"covariance {covariance}")


def listed(parts: list[str]) -> str:
    """One, two and three."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
