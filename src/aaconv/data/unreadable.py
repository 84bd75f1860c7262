"""Images that cannot be read: named, counted, skipped, and an error when there are too many of them."""

import logging

LIMIT = 50

_logger = logging.getLogger(__name__)


class UnreadableImage(Exception):
    """One image that cannot be decoded: `name` says which, `reason` why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason


class Skipped:
    """The unreadable images met so far, by name; one that is met again is not counted again."""

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 0:
            raise ValueError(f"the limit of unreadable images must be at least 0, got {limit}")
        self.limit = limit
        self.reasons: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.reasons)

    def add(self, image: UnreadableImage) -> None:
        """Log the image; more than `limit` of them are an OSError."""
        if image.name in self.reasons:
            return
        self.reasons[image.name] = image.reason
        if len(self) > self.limit:
            first, reason = next(iter(self.reasons.items()))
            raise OSError(
                f"{len(self)} images cannot be read, the limit is {self.limit}; the first is {first}: {reason}"
            )
        _logger.warning(
            "skipped an unreadable image (%d of at most %d): %s: %s", len(self), self.limit, image.name, image.reason
        )
