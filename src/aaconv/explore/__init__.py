"""See what a network attends to: `aaconv explore` writes a page to click around in, or the paper's figure."""

from .figure import write_figure
from .notebook import Shown, show
from .page import Written, write_page

__all__ = ["Shown", "Written", "show", "write_figure", "write_page"]
