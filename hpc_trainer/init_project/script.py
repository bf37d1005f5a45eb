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

from hpc_trainer.init_project.source import Argument, Source, last_name

_MOST_LINES = 12
_MOST_ARGUMENTS = 24


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
    num_more: int = 0
    """Number of further lines that are not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Result of reading a script."""

    path: Path
    steps: tuple[Step, ...]
    as_it_is: str
    """The command that runs the script without a change, once; empty if the file starts nothing."""
    note: str = ""
    """Advice about a training loop that is elsewhere: in a library, or in another file; empty if the script has it."""


_RANKS = {
    "local_rank", "rank", "node_rank", "world_size", "gpus", "gpu", "gpu_id", "gpu_ids", "ngpu", "n_gpu", "num_gpus",
    "nodes", "num_nodes", "dist_url", "dist_backend", "master_addr", "master_port", "ngpus", "nproc_per_node", "device",
    "distributed", "multiprocessing_distributed", "dist_on_itp", "cpu", "cuda", "accel", "no_cpu", "no_cuda",
    "no_accel", "use_cpu", "use_cuda", "use_gpu",
}  # fmt: skip
_EPOCHS = {
    "epochs", "epoch", "num_epochs", "n_epochs", "nepochs", "n_epoch", "niter", "max_epochs", "total_epochs",
    "num_train_epochs", "train_epochs",
}  # fmt: skip
_STEPS = {
    "steps", "num_steps", "max_steps", "total_steps", "train_steps", "max_train_steps", "max_iters", "n_iters",
    "iterations", "num_iterations", "max_iterations",
}  # fmt: skip
_SEEDS = {"seed", "manual_seed", "manualseed", "global_seed", "random_seed"}
_FILES = {
    "resume", "resume_from_checkpoint", "checkpoint", "checkpoint_dir", "ckpt", "ckpt_dir", "snapshot_path",
    "output_dir", "out", "out_dir", "outf", "results_dir", "save", "save_dir", "save_path", "log_dir",
}  # fmt: skip
_CLASSES = re.compile(r"(SGD|Adam\w*|Ada(grad|delta|factor)|R(MS)?prop|LBFGS|Lion|Muon|LARS|LAMB)$")
_STATEFUL = re.compile(r"(^|_)(optim(izer)?|opt|sched(uler)?|scaler|ema)([A-Z]|\d|_(?!cfg|args)[a-z0-9]{1,4})?$")
"""Names of objects whose state a checkpoint must hold."""
_OWN_TRAINERS = (
    (("lightning", "pytorch_lightning"), ("Trainer", "LightningCLI"), "Lightning"),
    (("lightning", "lightning_fabric"), ("Fabric", "LightningLite"), "Lightning Fabric"),
    (("transformers", "trl"), ("Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer"), "Hugging Face's Trainer"),
    (("accelerate",), ("Accelerator",), "Accelerate"),
    (("keras", "tensorflow", "tf_keras"), ("fit",), "Keras"),
    (("deepspeed",), ("initialize",), "DeepSpeed"),
    (("detectron2",), ("DefaultTrainer", "SimpleTrainer", "AMPTrainer"), "Detectron2"),
    (("mmengine", "mmcv"), ("Runner",), "MMEngine"),
    (("fairseq",), ("Trainer", "call_main"), "fairseq"),
)
"""Packages, the classes or functions of them that a script calls or derives from, and the library's name."""
_WITHOUT_TORCH = (
    (("jax", "flax", "optax"), "JAX"),
    (("tensorflow",), "TensorFlow"),
    (("xgboost",), "XGBoost"),
    (("lightgbm",), "LightGBM"),
    (("sklearn",), "scikit-learn"),
)
"""Packages that train without PyTorch, and the library's name."""
_RANK_VARIABLES = {
    "RANK": "run.rank",
    "LOCAL_RANK": "run.device",
    "WORLD_SIZE": "run.world_size",
    "MASTER_ADDR": "remove",
    "MASTER_PORT": "remove",
}
_GROUP_EXISTS = "remove: the group exists when main begins"
_SET_UP = re.compile(r"(init|setup|set_up)_?(distributed|ddp|dist)\w*|(distributed|ddp)_?(init|setup)")
_SEEDING = re.compile(r"((set|fix|setup)_(all_)?(random_)?seeds?|seed_everything|seed_all)$")
_LOADING = re.compile(r"(load|resume|restart)\w*(checkpoint|snapshot|state)\w*|resume_or_load")
_SAVING = re.compile(r"_?save_\w*(checkpoint|snapshot|state|model|master)\w*")
_NO_OPTIMIZER = re.compile(r"sched|prof|env|bar|writer|logger|checkpointer")
"""Owners of a method step() that is not an optimizer's."""


def read_training(path: Path) -> Reading:
    """Read a training script.

    Raises:
        ConfigError: the file cannot be read, or is not Python.
    """
    source = Source(path)
    names = _saved_names(source)
    loops = _training_loops(source)
    steps = (_arguments(source, loops), _ranks(source), _start(source, names), _loop(source, names, loops))
    starts = _starts_something(source) or _is_hydra_app(source)
    return Reading(
        path=path, steps=(*steps, _end(source)), as_it_is=_as_it_is(source) if starts else "",
        note=_note(source, loops, starts=starts),
    )  # fmt: skip


def _note(source: Source, loops: list[ast.For | ast.While], *, starts: bool) -> str:
    """Return advice for a script whose loop is in a library or in another file; else an empty text."""
    bases = {last_name(base) for node in source.nodes if isinstance(node, ast.ClassDef) for base in node.bases}
    keep = "keep it as a program; docs/any_program.md says how it resumes. The steps below are for a loop"
    for packages, classes, name in _OWN_TRAINERS:
        if source.imports(*packages) and (any(source.calls(*classes)) or bases & {*classes}):
            return f"It trains with {name}, which has ranks and checkpoints of its own: {keep} of your own."
    if not source.imports("torch"):
        for packages, name in _WITHOUT_TORCH:
            if source.imports(*packages):
                return f"It trains with {name}, without PyTorch: {keep} in PyTorch."
    if not starts:
        return f"{source.path.name} starts nothing by itself: name the script that is run. The steps list its lines."
    if loops:
        return ""
    beside = [f"hpc-trainer init --from {path}" for path in _imported_files(source)]
    more = f", as {beside[0]}" if len(beside) == 1 else f": {', '.join(beside[:3])}" if beside else ""
    return f"{source.path.name} has no loop that calls backward(). Name also the file that has it{more}."


def _imported_files(source: Source) -> Iterator[Path]:
    """Yield the files beside the script whose functions it imports and that call backward()."""
    for node in source.nodes:
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            path = source.path.parent / f"{module.replace('.', '/')}.py"
            if path.is_file() and "backward(" in path.read_text(encoding="utf-8", errors="replace"):
                yield path


def _starts_something(source: Source) -> bool:
    """Return True if running the file does more than define functions, classes and constants."""
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    return not all(
        isinstance(node, quiet)
        or (isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _declares(node.value)))
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for node in source.tree.body
    )


def _declares(node: ast.expr) -> bool:
    """Return True for a call that only declares a flag of absl."""
    return isinstance(node, ast.Call) and re.match(r"DEFINE_|mark_flags?_as", last_name(node.func)) is not None


def _as_it_is(source: Source) -> str:
    name = source.path.name
    more = _launch(source)
    if _is_hydra_app(source):
        return f"hpc-trainer submit hardware=cpu_x1 --app {name}{more}"
    arguments = [f"python {name}"]
    for argument in source.arguments.values():
        if argument.is_required and argument.flag:
            place = argument.flag.lstrip("-").replace("-", "_").upper()
            arguments.append(f"{argument.flag} {place}" if argument.flag.startswith("-") else place)
    if not source.arguments and (_parses(source) or source.imports("fire", "tyro", "typer", "jsonargparse")):
        arguments.append("ARGUMENTS")  # they are declared elsewhere
    key = _axis(source)
    if key is None:
        return f"hpc-trainer submit --command '{' '.join(arguments)}'{more}"
    argument = source.arguments[key]
    arguments.append(f"{argument.flag} {{params.{key}}}")
    return f"hpc-trainer submit --command '{' '.join(arguments)}' params.{key}={argument.default}{more}"


def _is_hydra_app(source: Source) -> bool:
    decorators = {
        last_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
        for node in source.nodes
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    }
    return "main" in decorators and source.imports("hydra")


def _parses(source: Source) -> bool:
    calls = (last_name(node.func) for node in source.nodes if isinstance(node, ast.Call))
    return any(name.startswith("parse_args") or name in ("parse_known_args", "LightningCLI") for name in calls)


def _axis(source: Source) -> str | None:
    """Return the argument that is most likely to be varied, with a number as its default; None if there is none."""

    def rank(name: str, argument: Argument) -> int:
        key = _plain(name)
        if key in ("lr", "learning_rate"):
            return 0
        if key in ("blr", "base_lr") or "learning_rate" in key:
            return 1
        if isinstance(argument.default, float):
            return 2
        return 3 if "batch" in key else 4

    usual = {
        name: argument
        for name, argument in source.arguments.items()
        if _plain(name) not in _RANKS | _FILES | _SEEDS
        and argument.flag.startswith("-")
        and not (argument.is_required or argument.is_switch)
        and isinstance(argument.default, (int, float))
        and not isinstance(argument.default, bool)
    }
    return min(usual, key=lambda name: rank(name, usual[name]), default=None)


def _launch(source: Source) -> str:
    """Return the override with which the script's ranks start; empty if it needs none."""
    if any(_spawns(source)):
        return " train.command_per=node"  # it starts its own ranks
    for node in source.nodes:
        is_read = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        needs = is_read and _rank_variable(node) in _RANK_VARIABLES
        if isinstance(node, ast.Call) and last_name(node.func) == "init_process_group":
            needs = not {word.arg for word in node.keywords} & {"init_method", "rank", "world_size", "store"}
        if needs and not source.condition(node):
            return " train.command_env=torchrun"  # a program of one rank finds no variables else
    return ""


def _spawns(source: Source) -> Iterator[ast.Call]:
    """Yield the calls by which the script starts its ranks."""
    for call in source.calls("spawn", "start_processes"):
        if isinstance(call.func, ast.Name) or re.search(r"(^|\.)(mp|multiprocessing)\.", ast.unparse(call.func)):
            yield call
    if source.imports("detectron2"):
        yield from source.calls("launch")


def _rank_variable(node: ast.AST) -> str:
    """Return the variable of the environment that an expression names; empty if it names none."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
        return ast.unparse(node.slice).strip("'\"")
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
        return ast.unparse(node.args[0]).strip("'\"")
    return ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _place(node: ast.AST, change: str) -> Place:
    text = ast.unparse(node).splitlines()[0]
    return Place(line=node.lineno, text=text if len(text) <= 70 else f"{text[:67]}..", change=change)  # type: ignore[attr-defined]


def _step(title: str, places: Iterable[Place], advice: str) -> Step:
    """Return a step with its first lines, each once."""
    unique = {place.line: place for place in reversed([*places])}
    ordered = sorted(unique.values(), key=lambda place: place.line)
    return Step(
        title=title, places=tuple(ordered[:_MOST_LINES]), advice=advice, num_more=max(0, len(ordered) - _MOST_LINES)
    )


def _arguments(source: Source, loops: list[ast.For | ast.While]) -> Step:
    places = [
        Place(line=argument.line, text=argument.flag, change=_key_of(name))
        for name, argument in source.arguments.items()
        if name
    ]
    if not places and loops:
        places = [
            _place(node, _key_of(node.targets[0].id))
            for node in source.tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and node.value.value is not None
        ]
    parses = [
        _place(call, "remove")
        for call in source.calls("parse_args", "parse_known_args")
        if isinstance(call.func, ast.Attribute)
    ]
    # Of many arguments those are listed that become something else than a key of params.
    usual = [place for place in places if place.change.startswith("config.params")]
    room = max(0, _MOST_ARGUMENTS - len(places) + len(usual) - len(parses))
    listed = [place for place in places if place not in usual] + usual[:room] + parses
    return Step(
        title="Arguments become keys of the configuration",
        places=tuple(sorted(listed, key=lambda place: place.line)),
        num_more=max(0, len(usual) - room),
        advice="put the script's code into def main(config, run); params.lr=0.1 on the command line is "
        'config.params["lr"] there, and with commas an axis of a grid',
    )


def _key_of(name: str) -> str:
    """Return what becomes of an argument, or of a constant that is set at the top of a script."""
    key = _plain(name)
    if key in _RANKS:
        return "remove: hardware= decides"
    if key in _FILES:
        return "remove: run.restore finds the newest checkpoint, run.save has a folder"
    if key in ("start_epoch", "start_step", "start_iter"):
        return "remove: run.restore returns the step"
    if key in _EPOCHS:
        return "config.train.num_steps, which counts steps: epochs * batches in an epoch"
    if key in _STEPS:
        return "config.train.num_steps"
    return "config.seed" if key in _SEEDS else f'config.params["{name}"]'


def _ranks(source: Source) -> Step:
    ends = "remove: the group ends after main"
    places = [
        *(_place(call, _GROUP_EXISTS) for call in source.calls("init_process_group")),
        *(_place(call, ends) for call in source.calls("destroy_process_group")),
        *(_place(call, "remove: hpc-trainer starts each rank") for call in _spawns(source)),
        *(_place(call, "remove: use run.device") for call in source.calls("set_device")),
        *(_place(call, ".to(run.device)") for call in source.calls("cuda") if isinstance(call.func, ast.Attribute)),
        *(
            _place(call, "remove: each GPU has a rank; use DistributedDataParallel")
            for call in source.calls("DataParallel")
        ),
    ]
    places += [
        _place(call, ".to(run.device)" if last_name(call.func) == "to" else "run.device")
        for call in source.calls("to", "device")
        if call.args and str(getattr(call.args[0], "value", "")).startswith("cuda")
    ]
    for node in source.nodes:
        name = _rank_variable(node)
        if name in _RANK_VARIABLES or name.startswith("SLURM_"):
            places.append(_place(node, _RANK_VARIABLES.get(name, "remove")))
        if isinstance(node, ast.Call) and _SET_UP.fullmatch(last_name(node.func)):
            places.append(_place(node, _GROUP_EXISTS))
        if isinstance(node, ast.Assign) and re.search(r"(^|[._])device$", ast.unparse(node.targets[0])):
            value = ast.unparse(node.value)
            if re.search(r"cuda|accelerator|\bmps\b|'cpu'", value):
                places.append(_place(node, "run.device"))
    return _step(
        "Ranks, process group and device exist already",
        places,
        "use run.device, run.rank and run.world_size; an override sets the number of ranks: hardware=gpu_x8",
    )


def _saved_names(source: Source) -> list[str]:
    """Return the names of the objects that a checkpoint must hold: models, optimizers, schedules, scalers, averages."""
    in_classes = {
        id(inner) for node in source.nodes if isinstance(node, ast.ClassDef) for inner in ast.walk(node)
    }  # local names of a method are not those of the loop
    names: dict[str, int] = {}
    for node in source.nodes:
        if id(node) in in_classes:
            continue
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            targets = node.targets[0]
            for target in targets.elts if isinstance(targets, ast.Tuple) else [targets]:
                if isinstance(target, ast.Name) and _has_state(target.id, last_name(node.value.func)):
                    names.setdefault(target.id, node.lineno)
        if isinstance(node, ast.Call) and _CLASSES.search(last_name(node.func)):
            inner = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            owners = [_owner(call) for call in inner if last_name(call.func) in ("parameters", "named_parameters")]
            names |= {owner: 0 for owner in owners if owner}
        if isinstance(node, ast.Call) and last_name(node.func) in ("state_dict", "load_state_dict"):
            owner = _owner(node)
            if owner:
                names.setdefault(owner, node.lineno)
    if "model" not in names and any(
        isinstance(node, ast.Name) and node.id == "model" and isinstance(node.ctx, ast.Store) for node in source.nodes
    ):
        names = {"model": 0, **names}
    ordered = sorted(names, key=lambda name: (bool(_STATEFUL.search(name)), names[name]))  # models first
    return [*dict.fromkeys(_wrapped(source, name) for name in ordered)]


def _has_state(name: str, kind: str) -> bool:
    """Return True if an object with this name, made by a class or function of this name, has a state."""
    is_of_class = _CLASSES.search(kind) or kind.endswith(("LR", "Scheduler", "GradScaler"))
    return bool(is_of_class or (_STATEFUL.search(name) and "parse" not in kind and kind != "get_args"))


def _owner(call: ast.Call) -> str:
    """Return the name whose method is called, without `.module`; empty if it is no plain name."""
    owner = ast.unparse(call.func.value).removesuffix(".module") if isinstance(call.func, ast.Attribute) else ""
    return owner if re.fullmatch(r"[A-Za-z_]\w*", owner) else ""


def _wrapped(source: Source, name: str) -> str:
    """Return the model of which `name` is only another name, as `raw = model.module if ddp else model`."""
    values = source.assigned(name)
    parts = [
        part for value in values for part in ((value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,))
    ]
    plain = {ast.unparse(part).removesuffix(".module") for part in parts}
    other = plain.pop() if len(plain) == 1 else ""
    return other if re.fullmatch(r"[A-Za-z_]\w*", other) and other != "None" else name


def _given(names: list[str]) -> str:
    return ", ".join(f"{name}={name}" for name in names or ["model", "optimizer"])


def _start(source: Source, names: list[str]) -> Step:
    places = []
    for call in (node for node in source.nodes if isinstance(node, ast.Call)):
        name, text = last_name(call.func), ast.unparse(call.func)
        given = " ".join(ast.unparse(argument) for argument in (*call.args, *call.keywords))
        gets_optimizer = re.match(r"(load|resume|restart)_", name) is not None and "optimizer" in given
        if name == "load_state_dict":
            if ".state_dict()" not in given:  # else a copy, as of a teacher
                keep = "; keep it for pretrained weights" if "strict" in given else ""
                places.append(_place(call, f"remove: run.restore fills it{keep}"))
        elif text == "torch.load" or _LOADING.fullmatch(name) or gets_optimizer:
            places.append(_place(call, "remove: use run.restore"))
        is_global = re.fullmatch(r"(torch(\.\w+)?\.)?manual_seed(_all)?|((np|numpy)\.)?random\.seed", text)
        if is_global or _SEEDING.search(name):
            places.append(_place(call, "remove: every rank is seeded from config.seed"))
    return _step(
        "Build everything, then restore once",
        places,
        f"before the loop: step = run.restore({_given(names)}).step   # 0 on a fresh start",
    )


def _training_loops(source: Source) -> list[ast.For | ast.While]:
    """Return the loop over batches, and the loop over epochs around it if there is one; [] if the file has none.

    The loop over batches is the innermost one that calls backward() and an optimizer's step(), itself or by a function
    of the file. A loop over parts of a batch calls only backward().
    """
    loops = [node for node in source.nodes if isinstance(node, (ast.For, ast.While))]
    functions = [node for node in source.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    found = max((loop for loop in loops if _trains(loop)), key=lambda loop: loop.lineno, default=None)
    callers = {function.name for function in functions if _calls_any(function, {"backward"})}
    while found is None and callers:
        found = max((loop for loop in loops if _calls_any(loop, callers)), key=lambda loop: loop.lineno, default=None)
        more = {function.name for function in functions if _calls_any(function, callers)}
        if more <= callers:
            break
        callers |= more
    if found is None:
        found = max(
            (loop for loop in loops if _calls_any(loop, {"backward"})), key=lambda loop: loop.lineno, default=None
        )
    if found is None:
        return []
    around = [loop for loop in loops if loop is not found and any(node is found for node in ast.walk(loop))]
    holders = {function.name for function in functions if any(node is found for node in ast.walk(function))}
    around = around or [loop for loop in loops if _calls_any(loop, holders) and loop is not found]
    epochs = max((loop for loop in around if isinstance(loop, ast.For)), key=lambda loop: loop.lineno, default=None)
    return [found] if epochs is None else [found, epochs]


def _calls_any(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(inner, ast.Call) and last_name(inner.func) in names for inner in ast.walk(node))


def _trains(loop: ast.AST) -> bool:
    """Return True if a loop calls backward() and the step() of an optimizer."""
    steps = any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
        and not _NO_OPTIMIZER.search(ast.unparse(node.func.value).lower())
        for node in ast.walk(loop)
    )
    return steps and _calls_any(loop, {"backward"})


def _loop(source: Source, names: list[str], loops: list[ast.For | ast.While]) -> Step:
    changes = (
        "continue at `step`: while step < run.num_steps",
        "the epoch follows from `step`: step // batches in an epoch",
    )
    places = [_place(loop, change) for loop, change in zip(loops, changes, strict=False)]
    places += [
        _place(node, "replace by run.save")
        for node in source.nodes
        if isinstance(node, ast.Call)
        and (ast.unparse(node.func) == "torch.save" or _SAVING.fullmatch(last_name(node.func)))
    ]
    for call in source.calls("DataLoader", "DistributedSampler", "RandomSampler"):
        words = {word.arg: getattr(word.value, "value", True) for word in call.keywords}
        default = True if last_name(call.func).endswith("Sampler") else None in words
        if words.get("shuffle", default) is not False:
            change = "the order must follow from `step`, or the data begin anew after a resume"
            is_open = None in words and "shuffle" not in words  # **kwargs may shuffle
            places.append(_place(call, f"if it shuffles: {change}" if is_open else change))
    places += [_place(call, "remove: run.should_stop reports signals") for call in source.calls("signal")]
    return _step(
        "Ask after each step whether to stop or to save",
        places,
        "after optimizer.step(): step += 1; stop = run.should_stop(step); "
        f"if stop or run.should_save(step): run.save(step, {_given(names)}); if stop: return",
    )


def _end(source: Source) -> Step:
    places = [
        *(
            _place(call, "run.log(step, {..}), at most a few times a second")
            for call in source.calls("add_scalar", "add_scalars")
        ),
        *(_place(call, "remove: tracker=tensorboard") for call in source.calls("SummaryWriter")),
    ]
    for call in source.calls("log", "log_metric", "log_metrics", "init", "start_run"):
        match = re.match(r"(wandb|mlflow)\.", ast.unparse(call.func))
        if match is not None:
            begins = last_name(call.func) in ("init", "start_run")
            tracker = f"tracker={match[1]}"
            places.append(_place(call, f"remove: {tracker}" if begins else f"run.log(step, {{..}}); {tracker}"))
    places += [_place(node, "remove: hpc-trainer calls main(config, run)") for node in _main_guards(source)]
    return _step(
        "Log with run.log, and end with run.finish",
        places,
        'after the loop: run.finish({"eval_accuracy": accuracy}); a main that ends otherwise is FAILED',
    )


def _main_guards(source: Source) -> Iterator[ast.If]:
    for node in source.nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'":
            yield node
