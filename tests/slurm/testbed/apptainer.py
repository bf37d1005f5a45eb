"""Apptainer, from a folder of its own (built once, kept), and an image of this machine's Python.

Debian has the program only in its newest suite. It finds its files beside itself, and needs a newer C library than
older releases have: its programs are changed to load the one that lies beside them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.slurm.testbed.chroot import debian_mirror
from tests.slurm.testbed.locks import locked
from tests.slurm.testbed.spec import BedError, cache_folder

_PACKAGES = ("apptainer", "libc6", "libseccomp2", "libsqlite3-0")
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LONGEST_S = 60.0
_APT = """Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "{folder}/lists";
Dir::Cache "{folder}/cache";
Dir::State::status "/dev/null";
APT::Sandbox::User "root";
"""


def ensure_apptainer() -> Path:
    """Return the folder of the program `apptainer`; fetch it if it is not there (some 15 s, 100 MB).

    Raises:
        BedError: it cannot be fetched here.
    """
    final = cache_folder() / "apptainer"
    bin_folder = final / "usr" / "bin"
    with locked(final.with_name(".apptainer.lock")):
        if not (final / "complete").exists():
            shutil.rmtree(final, ignore_errors=True)
            _fetch(final)
            _settle(final)
            _run([str(bin_folder / "apptainer"), "--version"])
            (final / "complete").touch()
    return bin_folder


def _run(argv: list[str], folder: Path | None = None, **env: str) -> None:
    try:
        subprocess.run(
            argv, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, check=True, timeout=_LONGEST_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BedError(f"no Apptainer: {error}") from error
    except subprocess.CalledProcessError as error:
        raise BedError(f"no Apptainer: {' '.join(argv)}: {error.stderr.strip()[-400:]}") from error


def _fetch(final: Path) -> None:
    """Unpack the packages, and patchelf of the host's own release."""
    packages = final / "packages"
    for name in ("lists/partial", "cache/archives/partial", "host"):
        (packages / name).mkdir(parents=True)
    (packages / "sources.list").write_text(f"deb [signed-by={_KEYS}] {debian_mirror()} sid main\n")
    (packages / "apt.conf").write_text(_APT.format(folder=packages))
    newest = str(packages / "apt.conf")
    _run(["apt-get", "update", "-qq"], APT_CONFIG=newest)
    _run(["apt-get", "download", "-qq", *_PACKAGES], packages, APT_CONFIG=newest)
    _run(["apt-get", "download", "-qq", "patchelf"], packages / "host")
    for path in packages.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(path), str(final)])
    for path in packages.glob("host/*.deb"):
        _run(["dpkg-deb", "-x", str(path), str(packages / "host")])


def _settle(final: Path) -> None:
    """Make the unpacked program work from its folder."""
    (starter,) = final.glob("usr/lib/*/apptainer/bin/starter")
    libraries = starter.parents[2]
    (loader,) = libraries.glob("ld-linux-*.so.*")
    for program in (final / "usr/bin/apptainer", starter):
        patchelf = final / "packages/host/usr/bin/patchelf"
        _run(
            [
                str(patchelf),
                "--set-interpreter",
                str(loader),
                "--force-rpath",
                "--set-rpath",
                str(libraries),
                str(program),
            ]
        )
    # It looks for its settings and folders beside its program and beside its libraries.
    settings = final / "etc/apptainer/apptainer.conf"
    # A machine of tests may lack privileges that root has elsewhere, and then it could not hand them on.
    text = settings.read_text().replace("root default capabilities = full", "root default capabilities = no")
    settings.write_text(text)
    for prefix in (final / "usr", final / "usr/lib"):
        (prefix / "etc").symlink_to(final / "etc")
        (prefix / "var/lib/apptainer/mnt/session").mkdir(parents=True)
        (prefix / "var/apptainer/mnt/session").mkdir(parents=True)
    shutil.rmtree(final / "packages")


def make_image(image: Path) -> list[str]:
    """Make an image with this Python and none of Slurm's commands, and return the folders to bind into it.

    The image itself has no more than the program of Python. The folders that it needs stay where they are.
    """
    for name in ("dev", "etc", "proc", "root", "sys", "tmp", "usr/bin", "usr/lib", "usr/lib64", "var/tmp"):
        (image / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    for name in ("group", "hosts", "localtime", "passwd", "resolv.conf"):
        (image / "etc" / name).touch()
    python = Path(sys.executable).resolve()
    inside = image / python.relative_to("/")
    inside.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(python, inside)
    for link in _links(Path(sys.executable)):  # a virtual environment's may lead to /usr/bin/python3, another link
        place = image / link.relative_to("/")
        if not place.is_relative_to(image / Path(sys.prefix).relative_to("/")) and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(python)
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    prefixes = [prefix for prefix in (sys.prefix, sys.base_prefix) if prefix != "/usr"]
    folders = ["/usr/lib", *(path for path in ("/usr/lib64",) if Path(path).is_dir()), *prefixes, *packages]
    return [path for path in dict.fromkeys(folders) if Path(path).is_dir()]


def _links(path: Path) -> Iterator[Path]:
    """Yield each link on the way from a path to its file, the path itself included if it is one."""
    while path.is_symlink():
        yield path
        path = path.parent / path.readlink()


def check_container(program: Path, image: Path, binds: Sequence[str]) -> None:
    """Raise if a container cannot start on this machine, where mounts may be forbidden.

    Raises:
        BedError: the message has what Apptainer printed.
    """
    words = [word for path in binds for word in ("--bind", path)]
    _run([str(program), "exec", *words, "--contain", "--no-home", str(image), sys.executable, "-c", "pass"])
