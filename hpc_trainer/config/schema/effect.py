"""When a key has an effect, said where the key is declared: `field(default=8, metadata=only_with("parallel.sync"))`."""

from __future__ import annotations

from collections.abc import Mapping

ONLY_WITH = "only_with"


def only_with(*needs: str) -> Mapping[str, tuple[str, ...]]:
    """Metadata of a field that changes nothing unless one of `needs` holds; another value than its default is refused
    then (`config/effect_rules.py`): the same training would count as another run.

    Args:
        needs: `section.key=value`, or `section.key` where any value but its default will do.
    """
    return {ONLY_WITH: needs}
