"""Source of weights that the user named: its place on the disk, the names in it, and its digest. No torch.

a run             its last or best checkpoint, read as a checkpoint
a checkpoint      names in its manifest.json, which has the checksums of all its files: the digest is its own
a .safetensors    names in its header; the digest is that of its bytes
a folder of them  as Hugging Face writes it: with an index, or only one file
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hpc_trainer.config.load import Memo
from hpc_trainer.config.name_patterns import fits_any, there_are
from hpc_trainer.config.schema.output import best_is_max, kept_best
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.user_files import open_given, read_given
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.features.init_from import InitFromConfig, WhichCheckpoint
from hpc_trainer.record import chain
from hpc_trainer.record import checkpoint_folders as folders
from hpc_trainer.record.checkpoint_folders import Retention
from hpc_trainer.record.files import sha256_of, write_atomic
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths, SweepPaths, default_runs_dir
from hpc_trainer.record.metrics import scores_in
from hpc_trainer.record.reading import is_there
from hpc_trainer.record.run_folder import journal_settles
from hpc_trainer.record.states import CANCEL, DONE
from hpc_trainer.record.trust import check_trusted

_SMALL = 64 << 20  # bytes; below, nothing is remembered
_MOST = 200  # files
_MANIFEST, _INDEX, _FILE = "manifest.json", ".safetensors.index.json", ".safetensors"
_FORMATS = frozenset({
    "F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64",
    "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ",
})  # fmt: skip
"""Number formats, as the library names them: those that training/checkpoint/trees.py reads."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SET_ASIDE = re.compile(r"\.old-\d+\Z")  # renamed by `submit --fresh`
_CONVERT = (
    'It can run code when it is loaded. Convert it where you trust it: python -c "import torch, '
    "safetensors.torch as s; s.save_file(torch.load('{name}', weights_only=True), 'weights.safetensors')\""
)


def fill(config: TrainConfig, memo: Memo) -> None:
    """Fill in the absolute path of the weights, and the digest of their content."""
    config.init_from = memo.of(resolved, config.init_from, config.paths.runs_dir)


def resolved(config: InitFromConfig, runs_dir: str | None) -> InitFromConfig:
    """Return `config` with the absolute path, and the digest of what is stored there now.

    A source that is not complete, or the best run of a sweep, gets `awaits` instead: the run finds it when it starts.

    Raises:
        ConfigError: there is nothing, the format is not supported, patterns do not fit the names in it, or its
            digest is not that of `config`.
    """
    assert config.path is not None
    folder = (Path(runs_dir).expanduser() if runs_dir else default_runs_dir()).absolute()
    awaited = _as_awaited(config, folder)
    return awaited or _as_there(config, folder)


def _as_there(config: InitFromConfig, runs_dir: Path) -> InitFromConfig:
    try:
        place = _find(config, runs_dir)
        where = f"init_from={place}"
        check_patterns(config, renamed(names_in(place), config, where), where)
        digest = digest_of(place)
    except OSError as error:
        raise ConfigError(f"init_from={config.path} cannot be read: {error}.") from error
    if config.digest not in (None, digest):
        raise ConfigError(
            f"{where} has the digest {digest}, and init_from.digest={config.digest} is required: the content differs. "
            "Name the content that you want, or use init_from.digest=null."
        )
    return dataclasses.replace(config, path=str(place), digest=digest)


def _as_awaited(config: InitFromConfig, runs_dir: Path) -> InitFromConfig | None:
    """Return `config` for a source that the run finds when it starts; None if the source is there now.

    A run that has ended without being complete is taken as it is now, with its last checkpoint.

    Raises:
        ConfigError: there is no such sweep, or it is not known which of its runs will be the best.
    """
    named = str(config.path)
    is_best = named.startswith(chain.BEST)
    if is_best:
        awaited = chain.find_awaited(named.removeprefix(chain.BEST), runs_dir, f"init_from={chain.BEST}")
        if awaited.run_id is not None:
            raise ConfigError(f"init_from={named} is one run. Use init_from={awaited.text(runs_dir)}.")
        specs = chain.specs_of(awaited.folder)
        goal = chain.goal_of(awaited.folder)
        metric = chain.metric_of(specs.values(), goal)
        if metric is None:
            raise ConfigError(
                f"init_from={named}: which run of {awaited.folder.name} is the best is not known, because its runs "
                "set no checkpoint.keep_best, and have no eval_accuracy or eval_loss of the shared loop. Name a run: "
                f"init_from={awaited.folder.name}/{next(iter(specs), 'RUN')}."
            )
        # The trials of a search are drawn one after the other, and must not change the id of what follows them.
        known = specs.values() if goal is None else goal.bases
        awaits = chain.digest_of(f"best by {metric}, {config.checkpoint.value}", known)
    else:
        unfinished = _unfinished_run(named, runs_dir)
        if unfinished is None:
            return None
        awaited, awaits = unfinished, awaited_digest(unfinished, config.checkpoint)
    if config.digest is not None:
        raise ConfigError(
            f"init_from.digest={config.digest} is the content of a complete source, and {named} is not complete. Leave "
            "it out."
        )
    return dataclasses.replace(config, path=f"{chain.BEST * is_best}{awaited.text(runs_dir)}", awaits=awaits)


def awaited_digest(awaited: chain.Awaited, which: WhichCheckpoint) -> str:
    """Return a digest to use in place of the content's digest, for a run that is not complete."""
    return chain.digest_of(f"run, {which.value}", [chain.specs_of(awaited.folder)[str(awaited.run_id)]])


def _unfinished_run(named: str, runs_dir: Path) -> chain.Awaited | None:
    """Return the run that a name means if the run has not ended; None for anything else."""
    given = Path(named).expanduser()
    if given.is_file() or is_checkpoint(given) or (given.is_dir() and not SweepPaths(given.absolute().parent).exists):
        return None
    place = str(given.absolute()) if given.is_dir() else named
    if "/" not in named and not given.is_dir():  # a run's id, or its beginning or end
        matches = [path for path in _runs(runs_dir) if _fits_run(path, named)]
        if matches:
            place = f"{matches[0].parent.name}/{matches[0].name}"
            if len(matches) > 1:
                return None  # `_find` lists them
    try:
        awaited = chain.find_awaited(place, runs_dir, "init_from=")
    except ConfigError:
        return None  # `_find` says what is wrong
    if awaited.run_id is None:
        return None
    run = awaited.sweep.run(awaited.run_id)
    if any(is_there(run.marker(name)) for name in (DONE, CANCEL)):
        return None
    attempts = Journal(run).read() if awaited.folder not in chain.PLANNED.get().sweeps else []
    if attempts and journal_settles(attempts[-1]) and folders.committed(run.checkpoints):
        return None
    return awaited


def _fits_run(path: Path, named: str) -> bool:
    return path.name == named or (
        not _SET_ASIDE.search(path.name) and (path.name.startswith(named) or path.name.endswith(named))
    )


def resolve_awaited(config: InitFromConfig, runs_dir: Path) -> tuple[InitFromConfig, dict[str, Any]]:
    """Return `config` with the place and digest of an awaited source, which is there now, and facts to record.

    Raises:
        ConfigError: there is no checkpoint, no run with the metric, or patterns do not fit the names in it.
    """
    named = str(config.path)
    facts: dict[str, Any] = {}
    if named.startswith(chain.BEST):
        sweep = chain.find_awaited(named.removeprefix(chain.BEST), runs_dir, f"init_from={chain.BEST}")
        best, metric = chain.best_of(sweep.folder)
        run = sweep.sweep.run(best.run_id)
        facts = {"best_by": metric, "value": best.metrics[metric]}
    else:
        awaited = chain.find_awaited(named, runs_dir, "init_from=")
        run = awaited.sweep.run(str(awaited.run_id))
    resolved_config = _as_there(dataclasses.replace(config, path=str(run.folder)), runs_dir)
    return resolved_config, {
        "path": resolved_config.path,
        "digest": resolved_config.digest,
        "run": f"{run.folder.parent.name}/{run.run_id}",
        **facts,
    }


def is_checkpoint(place: Path) -> bool:
    """Return True if `place` is the folder of one of our checkpoints."""
    return (place / _MANIFEST).is_file()


def files_in(place: Path) -> dict[str, Path]:
    """Return name of each tensor -> the file that has it, for a file or a folder of files.

    Raises:
        ConfigError: the index or a file is invalid, or they contradict each other.
        OSError: the folder cannot be read.
    """
    if place.is_file():
        return dict.fromkeys(read_names(place), place)
    index, files = _listing(place)
    if index is None:
        return dict.fromkeys(read_names(files[0]), files[0])
    file_of = _weight_map(index)
    held = {name: set(read_names(place / name)) for name in sorted(set(file_of.values()))}
    for tensor, name in file_of.items():
        if tensor not in held[name]:
            raise ConfigError(
                f"{index} lists {tensor} in {name}, and {name} does not contain it. Copy the folder again."
            )
    return {tensor: place / name for tensor, name in file_of.items()}


def read_names(path: Path) -> list[str]:
    """Return the names of the tensors in a .safetensors file, from its header; the file has each of them whole.

    Raises:
        ConfigError: it is not a safetensors file, it is damaged, or it cannot be read.
    """
    try:
        open_given(path).close()  # the library reports each error of the system as a missing file
        with safe_open(path, "numpy") as file:
            formats = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except SafetensorError as error:
        said = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{path} is not a safetensors file that this version can read, or is damaged: {said}. Copy it again."
        ) from error
    wrong = next((name for name, kind in formats.items() if kind not in _FORMATS), None)
    if wrong is not None:
        raise ConfigError(
            f"{path} is not a safetensors file that this version can read: {wrong} has the number format "
            f"{formats[wrong]}; supported are {', '.join(sorted(_FORMATS))}. Convert it."
        )
    return list(formats)


def names_in(place: Path) -> list[str]:
    """Return the names of all tensors in `place`; for a checkpoint only the model's. Raises ConfigError, OSError."""
    if not is_checkpoint(place):
        return list(files_in(place))
    try:
        check_trusted(place)
        manifest = _manifest(place)
        objects = _entries(_entries(manifest["replicated"])["objects"])
        if "model" not in objects:
            raise ConfigError(
                f"init_from={place} holds {', '.join(objects)}, and no object named `model`. Save the model under that "
                "name, as run.save(step, model=model)."
            )
        return [str(name) for name, node in _entries(objects["model"]).items() if not _KINDS.isdisjoint(node)]
    except RunStateError as error:
        raise ConfigError(f"init_from: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{place / _MANIFEST} is damaged: {error!r}. Name another checkpoint.") from error


def remembered(path: Path) -> str:
    """Return the SHA-256 of a file; of a large, unchanged file the remembered one. Raises OSError."""
    with open_given(path) as file:
        info = os.fstat(file.fileno())
    if info.st_size < _SMALL:
        return sha256_of(path)
    key = str(path.resolve())
    form = [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]
    digests = _read()
    if digests.get(key, [])[:-1] == form:
        return str(digests[key][-1])
    digest = sha256_of(path)
    kept = {name: entry for name, entry in digests.items() if name != key}
    _write({**dict(list(kept.items())[1 - _MOST :]), key: [*form, digest]})
    return digest


def _place() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpc_trainer" / "weights.json"


def _read() -> dict[str, list[Any]]:
    """Return the remembered digests; {} if the file cannot be read, or has other content."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        digests = json.loads(_place().read_bytes())
        if isinstance(digests, dict) and all(isinstance(entry, list) and len(entry) == 6 for entry in digests.values()):
            return digests
    return {}


def _write(digests: dict[str, list[Any]]) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        _place().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(_place(), json.dumps(digests) + "\n", sync=False)


def digest_of(place: Path, read: Callable[[Path], str] = remembered) -> str:
    """Return the SHA-256 of the content, 64 hex digits. Raises ConfigError, OSError.

    Args:
        read: returns the SHA-256 of a file.
    """
    if is_checkpoint(place):
        return read(place / _MANIFEST)
    if place.is_file():
        return read(place)
    index, _ = _listing(place)
    paths = [*sorted(set(files_in(place).values())), *([] if index is None else [index])]
    if len(paths) == 1:  # the same digest as that of the file by itself
        return read(paths[0])
    return hashlib.sha256("".join(f"{read(path)}  {path.name}\n" for path in paths).encode()).hexdigest()


_KINDS = frozenset({"tensor", "sharded"})


def _manifest(place: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raises OSError, or ConfigError if it is damaged."""
    try:
        manifest = json.loads(read_given(place / _MANIFEST))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place / _MANIFEST} is damaged: {error}. Name another checkpoint.") from error
    if not isinstance(manifest, dict):
        raise ConfigError(f"{place / _MANIFEST} is damaged: it is not a mapping. Name another checkpoint.")
    return manifest


def _entries(node: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the entries of a mapping in the structure of a checkpoint (training/checkpoint/trees.py)."""
    return dict(node["dict"])


def _find(config: InitFromConfig, runs_dir: Path) -> Path:
    """Return the absolute path that `init_from.path` names. Raises ConfigError if it names none, or several."""
    named = str(config.path)
    try:
        path = Path(named).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(
            f"init_from={named} begins with the home of a user whom this machine does not know."
        ) from error
    if path.suffix in _PICKLES:
        raise ConfigError(f"init_from={named} must be safetensors. {_CONVERT.format(name=path.name)}")
    if path.is_file():
        if path.suffix != _FILE:
            raise ConfigError(f"init_from={named} must be a .safetensors file, or a folder. Convert it to safetensors.")
        return path
    if not path.is_dir():
        path = _find_run(named, runs_dir.absolute())
    if is_checkpoint(path):
        if folders.step_of(path) is None:
            raise ConfigError(
                f"init_from={named} is a renamed checkpoint. Rename it to step-00001200, with the number of its step."
            )
        return path
    if (path / "checkpoints").is_dir():
        return _checkpoint_of(path, config.checkpoint)
    _listing(path)
    return path


def _find_run(named: str, runs_dir: Path) -> Path:
    """Return the folder of the one run with this id, or whose id begins or ends with it."""
    runs = {path: (path.name, f"{path.parent.name}/{path.name}") for path in _runs(runs_dir)}
    matches = [path for path, names in runs.items() if named in names] or [
        path
        for path, names in runs.items()
        if not _SET_ASIDE.search(path.name) and any(name.startswith(named) or name.endswith(named) for name in names)
    ]
    if len(matches) > 1:
        names = ", ".join(f"{path.parent.name}/{path.name}" for path in matches[:5])
        raise ConfigError(f"init_from={named} may be {names}. Write one of these.")
    if not matches:
        raise ConfigError(
            f"init_from={named} is neither a file nor a folder, and no run in {runs_dir} with checkpoints has that "
            "name. Name a run, a .safetensors file or a folder of these; `hpc-trainer status` has the ids of runs."
        )
    return matches[0]


def _runs(runs_dir: Path) -> Iterator[Path]:
    if runs_dir.is_dir():
        yield from (path.parent for path in sorted(runs_dir.glob("*/*/checkpoints")))


def _checkpoint_of(run: Path, which: WhichCheckpoint) -> Path:
    """Return the run's last or best checkpoint. Raises ConfigError if it has none, or its best is unknown."""
    saved = [(step, path) for step, path in folders.committed(run / "checkpoints") if is_checkpoint(path)]
    if not saved:
        raise ConfigError(f"init_from={run} has no checkpoint (yet). Wait until it has saved one, or name another run.")
    if which is WhichCheckpoint.last:
        return saved[0][1]
    try:
        kept = _manifest(saved[0][1])["meta"].get("made_with", {}).get("checkpoint", {})
        how = kept_best(kept)
    except (KeyError, AttributeError) as error:
        raise ConfigError(f"{saved[0][1] / _MANIFEST} is damaged: {error!r}. Name another checkpoint.") from error
    metric = how.keep_best
    if metric is None:
        raise ConfigError(
            f"init_from.checkpoint=best: {run} was trained without checkpoint.keep_best, so its best checkpoint is "
            "unknown. Use init_from.checkpoint=last, or name one: .../checkpoints/step-00000200."
        )
    scores = scores_in(RunPaths(run).metrics, metric)
    best = Retention(best_is_max=best_is_max(how)).best({step: scores[step] for step, _ in saved if step in scores})
    if best is None:
        raise ConfigError(
            f"init_from.checkpoint=best: no checkpoint of {run} has a {metric}. Use init_from.checkpoint=last."
        )
    return dict(saved)[best]


def _listing(folder: Path) -> tuple[Path | None, list[Path]]:
    """Return (the index or None, the .safetensors files) of a folder. Raises ConfigError for nothing, or several."""
    files = sorted(path for path in folder.iterdir() if path.name.endswith(_FILE) and path.is_file())
    indices = sorted(path for path in folder.iterdir() if path.name.endswith(_INDEX))
    if len(indices) == 1:
        return indices[0], files
    if not indices and len(files) == 1:
        return None, files
    pickle = next((path for path in sorted(folder.iterdir()) if path.suffix in _PICKLES), None)
    if not files and pickle is not None:
        raise ConfigError(
            f"init_from={folder} has {pickle.name}, and must have safetensors. {_CONVERT.format(name=pickle.name)}"
        )
    has = ", ".join(path.name for path in [*indices, *files][:5]) or "none"
    raise ConfigError(
        f"init_from={folder} must be a run, one of its checkpoints, or a folder with one .safetensors file or one "
        f"*{_INDEX}; it has {has}. Name the file that you mean."
    )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        file_of = json.loads(read_given(index))["weight_map"]
        wrong = next((name for name in file_of.values() if Path(name).name != name or not name.endswith(_FILE)), None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error!r}. Copy the folder again.") from error
    if wrong is not None or not file_of:
        raise ConfigError(
            f"{index} names {wrong!r}, and must name .safetensors files beside it. Copy the folder again."
        )
    return dict(file_of)


def is_wanted(name: str, config: InitFromConfig) -> bool:
    """Return True if `include` and `exclude` allow to load this weight of the model."""
    return (not config.include or fits_any(name, config.include)) and not fits_any(name, config.exclude)


def renamed(names: Collection[str], config: InitFromConfig, where: str) -> dict[str, str]:
    """Return name in the model -> name at `where`, for all names there.

    Raises:
        ConfigError: a pattern fits no name, two fit one name, or two names become one.
    """
    ways = [(there, _regex(there), here) for there, here in config.rename.items()]
    for pattern, regex, _ in ways:
        if not any(map(regex.fullmatch, names)):
            raise ConfigError(
                f"init_from.rename has {pattern!r}, which matches no name in {where}. {there_are(pattern, names)}"
            )
    origins: dict[str, str] = {}
    for name in names:
        fitting = [(pattern, match, here) for pattern, regex, here in ways if (match := regex.fullmatch(name))]
        if len(fitting) > 1:
            raise ConfigError(
                f"init_from.rename has {fitting[0][0]!r} and {fitting[1][0]!r}, which both match {name}. Make one of "
                "them narrower."
            )
        here = _filled(fitting[0][2], fitting[0][1].groups()) if fitting else name
        if here in origins:
            raise ConfigError(
                f"init_from.rename maps both {origins[here]} and {name} to {here}. Give one of them another name."
            )
        origins[here] = name
    return origins


def check_patterns(config: InitFromConfig, here: Mapping[str, str], where: str) -> None:
    """Check the patterns against the names `here`, as `renamed` returns them.

    Raises:
        ConfigError: a pattern of `include` matches none, or nothing is left.
    """
    for pattern in config.include:
        if not any(fnmatchcase(name, pattern) for name in here):
            raise ConfigError(
                f"init_from.include has {pattern!r}, which matches no name in {where}. {there_are(pattern, here)}"
            )
    if not any(is_wanted(name, config) for name in here):
        raise ConfigError(
            f"init_from.exclude={config.exclude} leaves nothing of {where} to load. Leave out a pattern, or "
            "init_from.path."
        )


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def _filled(pattern: str, parts: Iterable[str | None]) -> str:
    first, *rest = pattern.split("*")
    return first + "".join(f"{part}{value}" for part, value in zip(parts, rest, strict=True))
