"""first_weights.json: weights that a run with `init_from` started with. Rank 0 writes it; `show` and `why` read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from hpc_trainer.config.name_patterns import listed
from hpc_trainer.runs.files import write_json
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.reading import Faults, parsed_file
from hpc_trainer.runs.record_values import as_table, as_text, tuple_of, typed


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWeights:
    """Weights that `init_from` loaded, and those that it did not. Names are the model's, except in `unused`."""

    path: str
    digest: str
    loaded: Mapping[str, str] = field(default_factory=dict)
    """Name in the model -> name in the file."""
    converted: Sequence[str] = ()
    """Names in `loaded` whose number format in the file differs."""
    begin_anew: Sequence[str] = ()
    """Names that `init_from.include` and `exclude` leave out."""
    unused: Sequence[str] = ()
    """Names in the file that the model does not have, or that were left out."""

    def line(self) -> str:
        """Return the sentence for the log, `show` and `why`."""
        parts = [f"{len(self.loaded)} weights and buffers are from {self.path}"]
        if self.converted:
            parts.append(f"{len(self.converted)} of them in another number format")
        if self.begin_anew:
            parts.append(f"{listed(self.begin_anew)} began anew")
        if self.unused:
            parts.append(f"not used: {listed(self.unused)}")
        return f"init_from: {'; '.join(parts)}."


def write_first_weights(paths: RunPaths, found: FirstWeights) -> None:
    """Write the file; raise OSError if the file system refused."""
    write_json(paths.first_weights, asdict(found))


def read_first_weights(paths: RunPaths, faults: Faults | None = None) -> FirstWeights | None:
    """Return the record of a run; None if it started without `init_from`, has none yet, or the file is unreadable."""
    reported = Faults() if faults is None else faults
    return parsed_file(paths.first_weights, lambda record: FirstWeights(**typed(record, _NEEDED, _OTHERS)), reported)


def _as_names(value: object) -> dict[str, str]:
    return {name: as_text(there) for name, there in as_table(value).items()}


_as_list = tuple_of(as_text)
_NEEDED = {"path": as_text, "digest": as_text}
_OTHERS = {"loaded": _as_names, "converted": _as_list, "begin_anew": _as_list, "unused": _as_list}
