"""Five steps that lead an existing training script to `main(config, run)`, each with the lines of the script.

The script is parsed, and never run or imported. Its results are hints, because names are guessed from how they are
used.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.init_project.source import Source, last_name

_MOST_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Line of the script, and the change that it needs."""

    line: int
    text: str
    """The line's code, shortened."""
    change: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Step of the five that turn a script into a run."""

    title: str
    places: tuple[Place, ...]
    advice: str
    """Advice for the step; it holds also if no line of the script was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Result of reading a script."""

    path: Path
    steps: tuple[Step, ...]
    as_it_is: str
    """The command that runs the script without a change, once."""
    note: str = ""
    """Advice about a library that has the training loop; empty if the script has its own."""


_RANKS = {
    "local_rank", "rank", "world_size", "gpus", "gpu", "num_gpus", "nodes", "num_nodes", "dist_url", "dist_backend",
    "master_addr", "master_port", "ngpus", "nproc_per_node", "device", "distributed",
}  # fmt: skip
_KEY_OF_OPTION = {
    "epochs": "train.num_steps",
    "steps": "train.num_steps",
    "max_steps": "train.num_steps",
    "seed": "seed",
}
_FILES = {"resume", "checkpoint", "ckpt", "output_dir", "out", "save_dir", "log_dir"}
_CLASSES = re.compile(r"(SGD|Adam\w*|RMSprop|Adagrad|LBFGS|Lion|Muon)$")
_LIBRARIES = (
    (("lightning", "pytorch_lightning"), ("Trainer",), "Lightning"),
    (("transformers", "trl"), ("Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer"), "Hugging Face's Trainer"),
    (("accelerate",), ("Accelerator",), "Accelerate"),
    (("keras", "tensorflow"), ("fit",), "Keras"),
    (("deepspeed",), ("initialize",), "DeepSpeed"),
)
"""Packages, the classes or functions of them that a script calls, and the library's name."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOADERS = ("DataLoader", "DistributedSampler")


def read_training(path: Path) -> Reading:
    """Read a training script.

    Raises:
        ConfigError: the file cannot be read, or is not Python.
    """
    source = Source(path)
    names = _saved_names(source)
    steps = (_arguments(source), _ranks(source), _start(source, names), _loop(source, names), _end(source))
    return Reading(path=path, steps=steps, as_it_is=_as_it_is(source), note=_note(source))


def _note(source: Source) -> str:
    """Return advice for a script whose loop, or whose ranks, belong to a library; else an empty text."""
    for packages, classes, name in _LIBRARIES:
        is_used = any(_imports(node, package) for package in packages for node in source.nodes)
        if is_used and any(source.calls(*classes)):
            return (
                f"It trains with {name}, which has ranks and checkpoints of its own: keep it as a program; "
                "docs/any_program.md says how it resumes. The steps below are for a loop of your own."
            )
    return ""


def _as_it_is(source: Source) -> str:
    name = source.path.name
    decorators = {
        last_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
        for node in source.nodes
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    }
    if "main" in decorators and any(_imports(node, "hydra") for node in source.nodes):
        return f"hpc-trainer submit hardware=cpu_x1 --app {name}"
    arguments = [f"python {name}"]
    for argument in source.arguments.values():
        if argument.is_required and argument.flag:
            place = argument.flag.lstrip("-").replace("-", "_").upper()
            arguments.append(f"{argument.flag} {place}" if argument.flag.startswith("-") else place)
    subscripts = (node for node in source.nodes if isinstance(node, ast.Subscript))
    needs_variables = any(_rank_variable(node) in _RANK_VARIABLES for node in subscripts)
    more = " train.command_env=torchrun" if needs_variables else ""  # a program of one rank finds none of them else
    usual = [
        key
        for key, argument in source.arguments.items()
        if key not in _RANKS | _FILES and argument.flag.startswith("-") and not argument.is_required
    ]
    axis = next((key for key in usual if key in ("lr", "learning_rate")), usual[0] if usual else None)
    if axis is None:
        return f"hpc-trainer submit --command '{' '.join(arguments)}'{more}"
    argument = source.arguments[axis]
    default = argument.default
    value = default if isinstance(default, (int, float, str)) and not isinstance(default, bool) else 1
    arguments.append(f"{argument.flag} {{params.{axis}}}")
    return f"hpc-trainer submit --command '{' '.join(arguments)}' params.{axis}={value}{more}"


def _rank_variable(node: ast.AST) -> str:
    """Return the variable of the environment that an expression reads; empty if it reads none."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
        return ast.unparse(node.slice).strip("'\"")
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
        return ast.unparse(node.args[0]).strip("'\"")
    return ""


def _imports(node: ast.AST, package: str) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == package for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package


def _place(node: ast.AST, change: str) -> Place:
    text = ast.unparse(node).splitlines()[0]
    return Place(line=node.lineno, text=text if len(text) <= 70 else f"{text[:67]}..", change=change)  # type: ignore[attr-defined]


def _few(places: Iterable[Place]) -> tuple[Place, ...]:
    unique = {place.line: place for place in sorted(places, key=lambda place: place.line, reverse=True)}
    return tuple(sorted(unique.values(), key=lambda place: place.line))[:_MOST_LINES]


def _arguments(source: Source) -> Step:
    def change(name: str) -> str:
        if name in _RANKS:
            return "remove: hardware= decides"
        if name in _FILES:
            return "remove: run.restore finds the newest checkpoint, run.save has a folder"
        if name in _KEY_OF_OPTION:
            return f"config.{_KEY_OF_OPTION[name]}"
        return f'config.params["{name}"]'

    places = [
        Place(line=argument.line, text=argument.flag, change=change(name))
        for name, argument in source.arguments.items()
        if name
    ]
    places += [_place(call, "remove") for call in source.calls("parse_args", "parse_known_args")]
    places = sorted(places, key=lambda place: place.line)
    return Step(
        title="Arguments become keys of the configuration",
        places=tuple(places) if len(places) <= 3 * _MOST_LINES else tuple(places[: 3 * _MOST_LINES]),
        advice="put the script's code into def main(config, run); params.lr=0.1 on the command line is "
        'config.params["lr"] there, and with commas an axis of a grid',
    )


def _ranks(source: Source) -> Step:
    group = "remove: the group exists when main begins"
    places = [
        *(_place(call, group) for call in source.calls("init_process_group", "destroy_process_group")),
        *(_place(call, "remove: hpc-trainer starts each rank") for call in source.calls("spawn", "start_processes")),
        *(_place(call, "remove: use run.device") for call in source.calls("set_device")),
        *(_place(call, ".to(run.device)") for call in source.calls("cuda") if isinstance(call.func, ast.Attribute)),
    ]
    places += [
        _place(call, ".to(run.device)" if last_name(call.func) == "to" else "run.device")
        for call in source.calls("to", "device")
        if call.args and str(getattr(call.args[0], "value", "")).startswith("cuda")
    ]
    for node in source.nodes:
        name = _rank_variable(node)
        if name in _RANK_VARIABLES or name.startswith("SLURM_"):
            places.append(_place(node, "run.rank, run.world_size, run.is_rank_zero"))
    return Step(
        title="Ranks, process group and device exist already",
        places=_few(places),
        advice="use run.device, run.rank and run.world_size; an override sets the number of ranks: hardware=gpu_x8",
    )


def _saved_names(source: Source) -> list[str]:
    """Return the names of the objects that a checkpoint must hold: those whose state_dict is taken, and optimizers."""
    names: dict[str, None] = {}
    for call in source.calls("state_dict", "load_state_dict"):
        if isinstance(call.func, ast.Attribute):
            owner = ast.unparse(call.func.value).removesuffix(".module")
            if re.fullmatch(r"[A-Za-z_]\w*", owner):
                names[owner] = None
    for node in source.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            kind = last_name(node.value.func)
            if _CLASSES.search(kind) or kind.endswith(("LR", "Scheduler", "GradScaler")):
                names[node.targets[0].id] = None
    if "model" not in names and any(
        isinstance(node, ast.Name) and node.id == "model" and isinstance(node.ctx, ast.Store) for node in source.nodes
    ):
        names = {"model": None, **names}
    return [*names]


def _given(names: list[str]) -> str:
    return ", ".join(f"{name}={name}" for name in names or ["model", "optimizer"])


def _start(source: Source, names: list[str]) -> Step:
    places = [
        *(
            _place(call, "remove: use run.restore")
            for call in source.calls("load")
            if "torch" in ast.unparse(call.func)
        ),
        *(_place(call, "remove: run.restore fills it") for call in source.calls("load_state_dict")),
        *(
            _place(call, "remove: every rank is seeded from config.seed")
            for call in source.calls("manual_seed", "manual_seed_all", "seed_everything")
        ),
    ]
    return Step(
        title="Build everything, then restore once",
        places=_few(places),
        advice=f"before the loop: step = run.restore({_given(names)}).step   # 0 on a fresh start",
    )


def _training_loop(source: Source) -> ast.For | ast.While | None:
    """Return the innermost loop that holds a call of backward(); None if there is none."""
    loops = [node for node in source.nodes if isinstance(node, (ast.For, ast.While))]
    with_backward = [
        loop
        for loop in loops
        if any(isinstance(node, ast.Call) and last_name(node.func) == "backward" for node in ast.walk(loop))
    ]
    return max(with_backward, key=lambda loop: loop.lineno, default=None)


def _loop(source: Source, names: list[str]) -> Step:
    loop = _training_loop(source)
    places = [_place(loop, "continue at `step`: while step < run.num_steps")] if loop is not None else []
    places += [
        _place(call, "replace by run.save") for call in source.calls("save") if "torch" in ast.unparse(call.func)
    ]
    for call in source.calls(*_LOADERS):
        shuffles = any(
            word.arg == "shuffle" and getattr(word.value, "value", None) is not False for word in call.keywords
        )
        if shuffles or last_name(call.func) == "DistributedSampler":
            places.append(_place(call, "the order must follow from `step`, or the data begin anew after a resume"))
    places += [_place(call, "remove: run.should_stop reports signals") for call in source.calls("signal")]
    return Step(
        title="Ask after each step whether to stop or to save",
        places=_few(places),
        advice="after optimizer.step(): step += 1; stop = run.should_stop(step); "
        f"if stop or run.should_save(step): run.save(step, {_given(names)}); if stop: return",
    )


def _end(source: Source) -> Step:
    places = [
        *(_place(call, "run.log(step, {..}), at most a few times a second") for call in source.calls("add_scalar")),
        *(_place(call, "remove: tracker=tensorboard") for call in source.calls("SummaryWriter")),
        *(
            _place(call, "run.log(step, {..}); tracker=wandb, tracker=mlflow or tracker=tensorboard")
            for call in source.calls("log", "log_metric", "log_metrics", "init")
            if re.match(r"(wandb|mlflow)\.", ast.unparse(call.func))
        ),
    ]
    places += [_place(node, "remove: hpc-trainer calls main(config, run)") for node in _main_guards(source)]
    return Step(
        title="Log with run.log, and end with run.finish",
        places=_few(places),
        advice='after the loop: run.finish({"eval_accuracy": accuracy}); a main that ends otherwise is FAILED',
    )


def _main_guards(source: Source) -> Iterator[ast.If]:
    for node in source.nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'":
            yield node
