"""Where things lie that tests read and nobody makes."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
"""Real data sets beside the checkout; tests that need them skip where they are not."""
