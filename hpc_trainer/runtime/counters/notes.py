"""Notes on missing counters, each logged once: an absent counter must not fill the rank's log."""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)


class Notes:
    """Notes of one rank of one attempt."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, what: str, text: str) -> None:
        """Log `text`, unless a note on `what` was logged before."""
        if what not in self._told:
            self._told.add(what)
            _LOG.warning("telemetry: %s", text)

    @property
    def told(self) -> frozenset[str]:
        """Subjects of the notes logged so far."""
        return frozenset(self._told)
