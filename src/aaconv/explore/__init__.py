"""See what a network attends to: `aaconv explore` writes a page to click around in, or the paper's figure."""

from .figure import write_figure
from .page import Written, write_page

__all__ = ["Written", "write_figure", "write_page"]
