"""``python -m tests.slurm.testbed build|up|down|status|env``: a real Slurm on this machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from tests.slurm.testbed import bed, chroot, daemons
from tests.slurm.testbed.spec import PROFILES, RELEASES, VARIANTS, BedError, SharedFolder, Spec, default_release

_DOWN = 3  # the exit status of "status" for a cluster that is not up, as init scripts have it


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.testbed", description=__doc__)
    parser.add_argument("command", choices=("build", "up", "down", "status", "env"))
    parser.add_argument(
        "--release",
        default=default_release(),
        help=f"one of {', '.join(RELEASES)}; default: the variable SLURM, else {RELEASES[0]}",
    )
    known = ", ".join(name for name in VARIANTS if name)
    parser.add_argument("--variant", default="", help=f"one of {known}")
    parser.add_argument(
        "--share", default="", metavar="KIND", help="a shared folder of this kind, a client for each node"
    )
    parser.add_argument("--dir", type=Path, default=Path(), help="the state folder")
    return parser.parse_args()


def _use(spec: Spec) -> str:
    words = ["python", "-m", "tests.slurm.testbed", "env", "--release", spec.release]
    if spec.variant:
        words += ["--variant", spec.variant]
    if spec.share:
        words += ["--share", spec.share.kind]
    if spec.folder != spec.default_folder.absolute():
        words += ["--dir", str(spec.folder)]
    return f'eval "$({shlex.join(words)})"'


def _status(spec: Spec) -> int:
    if not spec.folder.exists():
        print(f"{spec.name}: down")
        return _DOWN
    missing = bed.missing_daemons(spec)
    if missing or not bed.is_up(spec):
        print(f"{spec.name}: broken; not running: {', '.join(sorted(missing)) or 'nothing'}")
        return _DOWN
    nodes = " ".join(f"{name}={state}" for name, state in daemons.nodes_by_state(spec).items())
    print(f"{spec.name}: up, Slurm {bed.version(spec)}, {nodes}, in {spec.folder}")
    return 0


def _env(spec: Spec) -> int:
    if not bed.is_up(spec):
        raise BedError(f"{spec.name} is not up")
    print(f'export PATH={shlex.quote(str(spec.bin))}:"$PATH"')
    print(f"export SLURM_CONF={shlex.quote(str(spec.conf))}")
    more = "${HPC_TRAINER_CONFIG_DIR:+:$HPC_TRAINER_CONFIG_DIR}"
    print(f'export HPC_TRAINER_CONFIG_DIR={shlex.quote(str(PROFILES))}"{more}"')
    return 0


def _main() -> int:
    options = _arguments()
    try:
        share = SharedFolder(options.share) if options.share else None
        spec = Spec(options.release, options.variant, options.dir, share)
        if options.command == "build":
            if spec.chrooted:
                chroot.ensure_built(spec, _say)
            return 0
        if options.command == "up":
            fresh = bed.up(spec, _say)
            _say(f"use it: {_use(spec)}" if fresh else f"{spec.name} is up already: {_use(spec)}")
            return 0
        if options.command == "down":
            _say(f"{spec.name} is down" if bed.down(spec) else f"{spec.name} was not up")
            return 0
        return _status(spec) if options.command == "status" else _env(spec)
    except BedError as error:
        _say(f"error: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(_main())
