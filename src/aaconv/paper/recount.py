"""`make costs`: count our models and the rows of the paper's tables again, and keep what they cost."""

from collections.abc import Iterator

from ..cost import known
from ..recipes.paper import TABLES


def settings() -> Iterator[known.Setting]:
    """What the tables need besides our models as they are, each once."""
    seen = []
    for table in TABLES.values():
        for row in table.rows:
            for options in (row.options, row.options | row.fitted, row.started.options):
                setting = (row.model, table.size, options)
                if options and setting not in seen:
                    seen.append(setting)
                    yield setting


if __name__ == "__main__":
    known.write(settings())
