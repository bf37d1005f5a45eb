"""`cluster.environment`: the lines, srun options and command prefix that start the ranks in their software.

Each kind is written as its own documentation says; all values are quoted for the shell.

- Environment Modules and Lmod: `module purge`, `module load NAME`. A shell that is no login shell may lack `module`,
  which the files of /etc/profile define (https://lmod.readthedocs.io/en/latest/060_locating.html).
- venv: `source FOLDER/bin/activate`, or FOLDER/bin/python alone (https://docs.python.org/3/library/venv.html).
- conda: `conda init` only writes into ~/.bashrc what a shell can also read from the installation, by
  etc/profile.d/conda.sh or `conda shell.bash hook`
  (https://docs.conda.io/projects/conda/en/stable/dev-guide/deep-dives/activation.html).
- conda-pack: the archive has no folder of its own, and conda-unpack corrects the paths in it
  (https://conda.github.io/conda-pack/).
- Apptainer, Singularity: `exec [options] IMAGE COMMAND`, --bind SRC[:DEST[:OPTIONS]], --nv, --rocm
  (https://apptainer.org/docs/user/latest/cli/apptainer_exec.html). APPTAINERENV_X or SINGULARITYENV_X sets X inside,
  also with --cleanenv (https://apptainer.org/docs/user/latest/environment_and_metadata.html).
- enroot with pyxis: srun --container-image=, --container-mounts=SRC:DST[:FLAGS][,...]
  (https://github.com/NVIDIA/pyxis/wiki/Usage).
- CSCS: srun --environment=EDF (https://docs.cscs.ch/software/container-engine/run/); srun --uenv= --view=, and
  `uenv run --view=VIEW IMAGE -- COMMAND` (https://docs.cscs.ch/software/uenv/using/).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config import script_words
from hpc_trainer.config.schema.cluster import ClusterConfig, Container, EnvironmentConfig, Executor, HardwareConfig
from hpc_trainer.config.script_words import shown

_APPTAINER = (Container.apptainer, Container.singularity)
_BY_SRUN = (Container.pyxis, Container.edf, Container.uenv)
_ENVIRONMENTS = ("venv", "uv", "conda")
STAGED = "HPC_TRAINER_STAGED"
"""Variable that names the copy of `cluster.environment.stage` that this process runs from, on its node's disk."""
IMAGE_FACTS = "HPC_TRAINER_IMAGE_FACTS"
"""Variable with size and time of change of the image, which the batch shell sees even if the container does not."""
STAGE_KEY = "HPC_TRAINER_STAGE_KEY"
"""Variable with size and time of change of the packed environment, asked once a job."""

PACK_FACTS = ".hpc_trainer_pack.json"
"""File at the top of an archive of `hpc-trainer pack` and of each copy, with digest and origin of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Parts of a batch script by which the ranks start in their environment."""

    lines: tuple[str, ...] = ()
    """Lines before those of cluster.setup."""
    facts: tuple[str, ...] = ()
    """Lines that ask for facts to record; none can fail."""
    srun_args: tuple[str, ...] = ()
    words: tuple[str, ...]
    """Words before the arguments of Python: the container's command and the Python."""
    sbatch: Mapping[str, Any]
    """Options of sbatch."""


def environment_of(cluster: Mapping[str, Any]) -> EnvironmentConfig:
    """Return `cluster.environment` of a frozen configuration; the default if an older version froze it."""
    from hpc_trainer.config.load import section_from_plain  # loads all sections, which `status` does not need

    return section_from_plain(EnvironmentConfig, cluster.get("environment") or {})


def changes_python(cluster: Mapping[str, Any]) -> bool:
    """Return True if the environment may give the ranks another Python or import path than the command that submits."""
    environment = environment_of(cluster)
    others = ("modules", "purge_modules", *_ENVIRONMENTS, "container", "stage")
    return any(getattr(environment, name) for name in others) or not environment.inherit


def start_of(cluster: Mapping[str, Any], runs_dir: Path, *, has_gpus: bool) -> Start:
    """Return how the ranks of a frozen configuration start.

    Args:
        cluster: the section `cluster`.
        runs_dir: the absolute folder of sweeps, which a container must see.
        has_gpus: True if the run has GPUs.
    """
    environment = environment_of(cluster)
    python = tuple(shlex.split(cluster["python"])) if cluster.get("python") else _python(environment)
    facts: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    image, options = environment.image or "", tuple(environment.container_args)
    if environment.container is not None and Path(image).is_absolute():
        facts = (f"export {IMAGE_FACTS}=$(stat -Lc '%s %Y' -- {shlex.quote(image)} 2> /dev/null)",)
    if environment.container in _APPTAINER:
        binds = [word for bind in (str(runs_dir), *environment.binds) for word in ("--bind", bind)]
        gpus = [f"--{environment.gpus.value}"] if environment.gpus is not None and has_gpus else []
        program = str(environment.container.value)
        prefix = ("bash", "-c", INSIDE, "inside", program, "exec", *binds, *gpus, *options, image)
    elif environment.container is Container.pyxis:
        mounts = ",".join(bind if ":" in bind else f"{bind}:{bind}" for bind in (str(runs_dir), *environment.binds))
        srun_args = (f"--container-image={image}", f"--container-mounts={mounts}", *options)
    elif environment.container is Container.edf:
        srun_args = (f"--environment={image}", *options)
    elif environment.container is not None:
        view = (f"--view={environment.view}",) if environment.view else ()
        if environment.container is Container.uenv:
            srun_args = (f"--uenv={image}", *view, *options)
        else:
            prefix = ("uenv", "run", *view, *options, image, "--")
    elif environment.stage is not None:
        facts = (f"export {STAGE_KEY}=$(stat -Lc %s-%Y -- {shlex.quote(environment.stage)})",)
        has_other = any(getattr(environment, name) for name in _ENVIRONMENTS)
        python = ("bash", "-c", STAGE, "stage", environment.stage, python[0] if has_other else "")
    return Start(
        lines=tuple(environment_lines(environment)), facts=facts, srun_args=srun_args, words=(*prefix, *python),
        sbatch={} if environment.inherit else {"export": "NONE"},
    )  # fmt: skip


def environment_lines(environment: EnvironmentConfig) -> list[str]:
    """Return the lines of the batch script before those of cluster.setup."""
    lines = []
    if environment.modules or environment.purge_modules:
        lines.append("type module > /dev/null 2>&1 || source /etc/profile || true")
    lines += ["module purge"] if environment.purge_modules else []
    lines += [f"module load {shlex.quote(name)}" for name in environment.modules]
    if environment.container is not None or environment.stage is not None:
        return lines  # what is in the container, or in the copy on the node's disk, is not activated outside it
    folder = _folder(environment)
    if environment.conda is not None:
        root = environment.conda_root
        hook = f"source {shlex.quote(f'{root}/etc/profile.d/conda.sh')}" if root else 'eval "$(conda shell.bash hook)"'
        lines += [hook, f"conda activate {shlex.quote(environment.conda)}"]
    elif folder is not None:
        lines.append(f"source {shlex.quote(f'{folder}/bin/activate')}")
    return lines


def setup_of(cluster: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return the lines that run before the ranks, and how many of them come from `cluster.environment`."""
    lines = environment_lines(environment_of(cluster))
    return [*lines, *cluster["setup"]], len(lines)


def _folder(environment: EnvironmentConfig) -> str | None:
    return f"{environment.uv}/.venv" if environment.uv is not None else environment.venv


def _python(environment: EnvironmentConfig) -> tuple[str, ...]:
    """Return the Python of the ranks if `cluster.python` names none."""
    folder = _folder(environment)
    if environment.conda is not None:
        return (f"{environment.conda}/bin/python" if "/" in environment.conda else "python",)
    if folder is not None:
        return (f"{folder}/bin/python",)
    # Images of Debian have no `python`; those of conda, and each venv, have `python3` too.
    return ("python3",) if environment.container is not None else (sys.executable,)


# Runs as `bash -c INSIDE inside COMMAND...` in each rank: with --cleanenv, --containall or APPTAINER_CLEANENV a
# container sees no variable of Slurm, and its ranks would not know which they are. The container would expand a $ in
# such a value. An Apptainer that is called singularity takes both names and prefers its own.
INSIDE = (
    "for name in ${!SLURM*} ${!SUBMITIT_*} ${!HPC_TRAINER_*} CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES "
    "HIP_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK; do "
    r"[[ -v $name && ${!name} != *[\$\`\"\\]* ]] && "
    'export "APPTAINERENV_$name=${!name}" "SINGULARITYENV_$name=${!name}"; done; exec "$@"'
)

# Runs as `bash -c STAGE stage ARCHIVE PYTHON ARGUMENT...` in each rank: the first one of a node unpacks, the others
# wait. A copy is held by a shared flock until its last process ends, so that launch/frozen_code/unpacking.py, whose
# folder this is, removes no copy in use. A stop signal that comes meanwhile is passed on: runtime/stop.py reads it.
# One line, without control characters: it is a word of the batch script.
STAGE = (
    'archive=$1 other=$2; shift 2; trap "export HPC_TRAINER_STOPPED=SIGTERM" TERM; '
    'trap "export HPC_TRAINER_STOPPED=SIGUSR2" USR2; '
    f'key=env-${{{STAGE_KEY}:-none}}-$(printf %s "$archive" | cksum | cut -d " " -f 1); '
    'for place in "$SLURM_TMPDIR" "$TMPDIR" /tmp /var/tmp; do [ -d "$place" ] || continue; '
    '[ -O "$place" ] || [ -k "$place" ] || continue; '
    'case $(stat -f -c %T -- "$place") in ext*|xfs|btrfs|zfs|f2fs|tmpfs|ramfs|overlay*) ;; *) continue;; esac; '
    'mine=$place/hpc_trainer-$UID copy=$mine/$key; mkdir -m 700 -- "$mine" 2> /dev/null; '
    '[ ! -L "$mine" ] && [ -O "$mine" ] && [ "$(stat -c %a -- "$mine")" = 700 ] || continue; '
    'exec 9> "$copy.lock" || continue; flock 9; '
    'if [ ! -e "$copy/.complete" ]; then rm -rf -- "$copy"; '
    'mkdir -m 700 -- "$copy" && tar -x --no-same-owner -f "$archive" -C "$copy" && '
    'if [ -e "$copy/bin/conda-unpack" ]; then "$copy/bin/python" "$copy/bin/conda-unpack"; fi && '
    '[ -x "$copy/bin/python" ] && : > "$copy/.complete" || '
    '{ echo "the environment was not unpacked in $mine" >&2; rm -rf -- "$copy"; exec 9>&-; continue; }; fi; '
    f'exec 8< "$copy"; flock -s 8; touch -- "$copy"; exec 9>&-; export {STAGED}="$copy"; '
    'if [ -e "$copy/bin/conda-unpack" ]; then source "$copy/bin/activate"; '
    'else export VIRTUAL_ENV=$copy PATH="$copy/bin:$PATH"; fi; '
    'exec "$copy/bin/python" "$@"; done; '
    'echo "no disk of this node takes $archive: ${other:-no other environment is named}" >&2; '
    '[ -n "$other" ] || exit 78; exec "$other" "$@"'
)


def environment_problems(cluster: ClusterConfig, hardware: HardwareConfig) -> Iterator[str]:
    """Yield each problem with `cluster.environment`."""
    environment, section = cluster.environment, "cluster.environment"
    if environment == EnvironmentConfig():
        return
    yield from _value_problems(environment)
    chosen = [name for name in _ENVIRONMENTS if getattr(environment, name) is not None]
    if len(chosen) > 1:
        unset = " ".join(f"{section}.{name}=null" for name in chosen[1:])
        yield f"{section} has {' and '.join(chosen)}: the ranks run one Python. Keep one, for example: {unset}."
    container = environment.container
    if container is None:
        if environment.stage is not None and cluster.python is not None:
            yield (
                f"{section}.stage provides the Python of the ranks, and cluster.python={shown(cluster.python)} names "
                "another. Use cluster.python=null."
            )
        if environment.stage is not None and cluster.executor is Executor.local:
            yield (
                f"{section}.stage copies the environment to the nodes of Slurm, and this machine needs no copy. Use "
                f"{section}.stage=null."
            )
        return
    kind = f"{section}.container={container.value}"
    if environment.image is None:
        yield f"{kind} needs an image. Use {section}.image={_EXAMPLES[container]}, or {section}.container=null."
    if environment.conda is not None:
        yield (
            f"{kind} and {section}.conda={shown(environment.conda)}: conda is not activated in a container. Use "
            f"{section}.conda=null cluster.python={_conda_python(environment.conda)}, the Python as the container "
            "sees it."
        )
    if environment.stage is not None:
        yield f"{kind} has one file for all its software already. Use {section}.stage=null."
    if container in _BY_SRUN and cluster.executor is Executor.local:
        nearest = "uenv_run" if container is Container.uenv else "apptainer"
        yield (
            f"{kind} is an option of srun, which cluster.executor=local does not use. Use "
            f"{section}.container={nearest}."
        )
    if container in _APPTAINER and hardware.device_type == "cuda" and environment.gpus is None:
        yield (
            f"{kind} with hardware.gpus_per_node={hardware.gpus_per_node}: without the driver's libraries the "
            f"container sees no GPU. Use {section}.gpus=nv for NVIDIA's, {section}.gpus=rocm for AMD's."
        )


_EXAMPLES = {
    Container.apptainer: "/shared/images/torch.sif",
    Container.singularity: "/shared/images/torch.sif",
    Container.pyxis: "/shared/images/torch.sqsh",
    Container.edf: "torch",
    Container.uenv: "pytorch/v2.6.0:v1",
    Container.uenv_run: "pytorch/v2.6.0:v1",
}


def _conda_python(conda: str) -> str:
    return (
        shlex.quote(f"{conda}/bin/python")
        if "/" in conda
        else f"/opt/conda/envs/{script_words.plain(conda)}/bin/python"
    )


def _value_problems(environment: EnvironmentConfig) -> Iterator[str]:
    section = "cluster.environment"
    for name in environment.modules:
        yield from _word_problem(f"{section}.modules", name)
    for key in ("venv", "uv", "conda_root", "stage"):
        yield from _folder_problem(f"{section}.{key}", getattr(environment, key))
    if environment.conda is not None:
        if "/" in environment.conda:
            yield from _folder_problem(f"{section}.conda", environment.conda)
        else:
            yield from _word_problem(f"{section}.conda", environment.conda)
    if environment.image is not None:
        is_path = environment.image.startswith(("/", "~", "$"))  # else a name in a registry, or a relative path
        check = _folder_problem if is_path else _word_problem
        yield from check(f"{section}.image", environment.image)
    if environment.view is not None:
        yield from _word_problem(f"{section}.view", environment.view)
    for bind in environment.binds:
        wrong = list(_folder_problem(f"{section}.binds", bind))
        yield from wrong
        if not wrong and ("," in bind or bind.count(":") > 2):
            yield f"{section}.binds holds {shown(bind)}: each entry is one FOLDER, FOLDER:INSIDE or FOLDER:INSIDE:ro."
    for option in environment.container_args:
        yield from script_words.srun_problem(option, f"{section}.container_args")


def _word_problem(key: str, value: str) -> Iterator[str]:
    if not value or value.startswith("-") or any(char.isspace() for char in value) or script_words.has_control(value):
        nearest = script_words.plain(value) or "another name"
        yield f"{key} holds {shown(value)}: it must be one name, without spaces or a leading -. Use {nearest}."


def _folder_problem(key: str, value: str | None) -> Iterator[str]:
    if value is None or (value.startswith("/") and not script_words.has_control(value)):
        return
    home = value.removeprefix("~").removeprefix("$HOME").removeprefix("${HOME}")
    nearest = f"'${{oc.env:HOME}}{home}'" if home != value else shlex.quote(str(Path(value).absolute()))
    yield f"{key} holds {shown(value)}: it must be an absolute path without shell syntax. Use {key}={nearest}."


def runs_dir_problem(environment: EnvironmentConfig, folder: str) -> Iterator[str]:
    """Yield the problem with a folder of sweeps whose path a container's option cannot hold."""
    if environment.container in (*_APPTAINER, Container.pyxis) and set(folder) & set(":,"):
        yield (
            f"the folder of sweeps {shown(folder)} holds : or , which divide the binds of "
            f"cluster.environment.container={environment.container.value}. Use another paths.runs_dir, or a symbolic "
            "link."
        )
