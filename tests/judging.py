"""Claims judged on results of a test."""

from largeprompt.paper.experiments import CLAIMS


def judged(key, choice, results):
    """What becomes of a claim, whose experiments make their datasets of these results."""
    claim = CLAIMS[key]
    return claim.judge(*(experiment.dataset(choice, results) for experiment in claim.of))
