"""Says each thing once, in the rank's log: a counter that is not there is no reason to fill it."""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)


class Notes:
    """Of one rank of one attempt."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, what: str, text: str) -> None:
        """Logs `text`, unless something was told of `what` before."""
        if what not in self._told:
            self._told.add(what)
            _LOG.warning("telemetry: %s", text)

    @property
    def told(self) -> frozenset[str]:
        """What something was told of."""
        return frozenset(self._told)
