"""Another Debian release's Slurm, beside the host's own, from a folder (built once, kept)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.slurm.testbed.locks import locked
from tests.slurm.testbed.spec import SUITES, BedError, Spec, cache_folder

# The libraries after munge are what the host's CPython and torch need to run inside unchanged.
_PACKAGES = (
    "slurmctld slurmd slurmdbd slurm-client munge libmariadb3 libffi8 libssl3t64 libsqlite3-0 "
    "libgomp1 libstdc++6 libexpat1 libbz2-1.0 liblzma5 libreadline8t64 libncursesw6 libuuid1 "
    "zlib1g procps"
)
_DEBIAN_SUITES = {"bullseye", "bookworm", "trixie", "forky", "sid", "testing", "stable", "unstable"}
_SHARED = ("/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/run", "/tmp")
_SHARED_FILES = ("/etc/hosts", "/etc/resolv.conf", "/etc/passwd", "/etc/group")
_SCRIPTS = Path("/usr/share/debootstrap/scripts")
MARKER = ".hpc-trainer-testbed"
"""A file in the chroot's top folder, by which a command knows that it runs inside."""


def cached_root(spec: Spec) -> Path:
    """The folder that holds the release's system between uses."""
    return cache_folder() / f"slurm-{spec.release}"


def _capture(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BedError(f"{argv[0]} failed: {error}") from error


def debian_mirror() -> str:
    """The Debian mirror that this host's apt is set up with."""
    override = os.environ.get("HPC_TRAINER_DEBIAN_MIRROR")
    if override:
        return override
    listing = _capture("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages")
    for line in listing.splitlines():
        uri, _, suite = line.partition(" ")
        if suite.strip() in _DEBIAN_SUITES and "security" not in uri:
            return uri
    raise BedError("apt knows no Debian mirror here: name one in the variable HPC_TRAINER_DEBIAN_MIRROR")


def _proxy() -> dict[str, str]:
    """The proxy apt uses: debootstrap fetches with wget, which reads only the environment."""
    match = re.search(r"='(.*)'", _capture("apt-config", "shell", "P", "Acquire::http::Proxy"))
    return {"http_proxy": match[1]} if match and match[1] not in {"", "DIRECT"} else {}


def _debootstrap(spec: Spec, target: Path) -> None:
    suite = SUITES[spec.release]
    argv = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES.split())}"]
    argv += [suite, str(target), debian_mirror()]
    if not (_SCRIPTS / suite).exists():
        argv.append("sid")  # a suite newer than the host's debootstrap: the same steps do
    log = target.with_suffix(".log")
    with log.open("wb") as sink:
        env = {**_proxy(), **os.environ}
        done = subprocess.run(argv, stdout=sink, stderr=sink, env=env, check=False)
    if done.returncode != 0:
        raise BedError(f"debootstrap of {suite} failed with {done.returncode}: see {log}")
    log.unlink()


def ensure_built(spec: Spec, say: Callable[[str], None]) -> None:
    """Build the release's system unless it is there (about 45 s, 300 MB)."""
    final = cached_root(spec)
    with locked(final.with_name(f".{final.name}.lock")):
        if (final / MARKER).exists():
            return
        if shutil.which("debootstrap") is None:
            raise BedError("debootstrap is missing: apt-get install debootstrap")
        say(f"building Slurm {spec.release} from Debian {SUITES[spec.release]} in {final} (once)")
        partial = final.with_name(f"{final.name}-building")
        try:
            _remove_tree(partial)
            _debootstrap(spec, partial)
            for package in (partial / "var/cache/apt/archives").glob("*.deb"):
                package.unlink()
            (partial / MARKER).touch()
            partial.rename(final)
        finally:
            _remove_tree(partial)


def _remove_tree(folder: Path) -> None:
    if folder.exists():
        _unmount_below(folder)  # debootstrap mounts /proc while it works
        shutil.rmtree(folder)


def _python_paths() -> list[Path]:
    """The folders that the running Python needs."""
    paths = []
    for prefix in {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}:
        if prefix == Path("/usr"):
            # Binding all of /usr would hide the very release this is about.
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            candidates = (f"/usr/bin/{version}", "/usr/bin/python3", f"/usr/lib/{version}")
            paths += [Path(path) for path in (*candidates, "/usr/lib/python3")]
        else:
            paths.append(prefix)
    return paths


def _wanted_mounts(spec: Spec) -> list[Path]:
    """What the inside shares with the host, outermost first."""
    extra = os.environ.get("HPC_TRAINER_SLURM_BIND", "")
    project = Path(__file__).resolve().parents[3]
    wanted = [Path(part) for part in (*_SHARED, *_SHARED_FILES, *extra.split(":")) if part]
    wanted += [project, Path.home(), Path.cwd(), spec.folder, *_python_paths()]
    result: list[Path] = []
    for path in sorted({p for p in wanted if p.exists() and p != Path("/")}):
        # A bind mount does not carry along the file systems mounted below it.
        device = path.stat().st_dev
        if not any(path.is_relative_to(up) and up.stat().st_dev == device for up in result):
            result.append(path)
    return result


def _bind(source: Path, target: Path) -> None:
    # Private: where / is a shared mount (systemd), what is mounted here later would otherwise
    # show up in the host's own tree too, and the other way round.
    _capture("mount", "--bind", str(source), str(target))
    _capture("mount", "--make-private", str(target))


def mount(spec: Spec) -> None:
    """Mount the release's system, and in it the host's folders that jobs need.

    Every cluster has a mount of its own, so that taking one down leaves its siblings whole.
    """
    _bind(cached_root(spec), spec.root)
    for source in _wanted_mounts(spec):
        target = spec.root / source.relative_to("/")
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_symlink():
                target.unlink()
            target.touch()
        _bind(source, target)


def _mounted_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    points = [line.split()[1].replace("\\040", " ") for line in lines]
    return [p for p in points if p == str(folder) or p.startswith(f"{folder}/")]


def _unmount_below(folder: Path) -> None:
    """Take down every mount at or below a folder, last one first.

    Removing the folder afterwards would otherwise empty the host's own /tmp and $HOME, so a
    mount that stays is an error.
    """
    for point in reversed(_mounted_below(folder)):
        done = subprocess.run(["umount", point], capture_output=True, check=False)
        if done.returncode != 0:  # still in use by something that is ending: detach it
            _capture("umount", "--lazy", point)
    left = _mounted_below(folder)
    if left:
        raise BedError(f"still mounted: {', '.join(left)}")


def unmount(spec: Spec) -> None:
    """Take down what ``mount`` put there, and anything else below the state folder."""
    _unmount_below(spec.folder)
