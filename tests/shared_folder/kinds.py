"""The kinds of shared folders that tests play: what each one caches, loses, delays and refuses, with its source.

Sources: nfs(5), open(2), flock(2), rename(2); RFC 1813 (NFS 3) and RFC 8881 (NFS 4.1); Linux's client in
fs/nfs/dir.c, inode.c and file.c; the Lustre Operations Manual and lustre/llite/file.c.
"""

from __future__ import annotations

import dataclasses
import errno

__all__ = ["KINDS", "Kind", "kind_of"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """Behaviour of one client of a shared folder. Times are in seconds, rates are probabilities per request."""

    name: str

    # A strong client knows what the server knows. Lustre: a client caches names and attributes under locks, which the
    # server takes back before another client changes them (Operations Manual, "Lustre features: POSIX standard
    # compliance"); what is asked of the server is what has changed. Others keep attributes and names, as below.
    strong: bool = False

    # nfs(5), acregmin, acregmax, acdirmin, acdirmax: defaults 3, 60, 30, 60. `actimeo` sets all four.
    acregmin: float = 3.0
    acregmax: float = 60.0
    acdirmin: float = 30.0
    acdirmax: float = 60.0

    # nfs(5), lookupcache=all: missing names are kept too. `positive` looks a missing name up each time.
    missing_names: bool = True
    # RFC 1813, 3.3.3: an answer to LOOKUP holds the folder's attributes, and nfs3_proc_lookup() takes them over.
    # nfs4_proc_lookup() asks for those of the file only.
    lookup_refreshes_folder: bool = True
    # fs/nfs/dir.c, nfs4_do_lookup_revalidate(): NFS 4 opens by folder and name; NFS 3 looks at the known file again.
    open_by_name: bool = False

    # nfs(5), "Data and metadata coherence": written data stays in the client until fsync, close or memory pressure.
    # vm.dirty_expire_centisecs is 30 s; the size limit stands in for memory pressure.
    buffered: bool = True
    dirty_limit: int = 1 << 20
    dirty_age: float = 30.0
    # open(2), close(2), write(2): ENOSPC, EDQUOT and EIO may be reported by a later write, fsync or close.
    late_errors: bool = True
    # open(2): "O_APPEND may lead to corrupted files on NFS if more than one process appends at once". Lustre locks.
    atomic_append: bool = False

    # RFC 1813, 4.2 and RFC 1094: a retransmitted request that is not idempotent fails although it was done. NFS 4.1
    # answers it from the session's reply cache (RFC 8881, 2.10.6). RFC 1813, 3.3.8 lets a server recognise a
    # repeated exclusive create by its verifier; servers that do not keep the verifier answer EEXIST. This is played.
    lost_replies: float = 0.0
    # Answers of a busy server: most at once, `late` of them after up to 50 ms, `very_late` of them after 1 to 3 s.
    late: float = 0.0
    very_late: float = 0.0

    # fs/nfs/unlink.c: a file that is open here is renamed to .nfsXXXX at its removal. Other clients get ESTALE.
    silly_rename: bool = True
    # fs/nfs/dir.c, nfs_rename(): "if (flags) return -EINVAL"; ll_rename() of Lustre too.
    rename_flags: bool = False

    # nfs(5), `lock`, `local_lock`; mount.lustre(8), `flock`, `localflock`, `noflock`.
    # coherent: seen by all clients; local: by this client only; refused: fails with lock_errno; hang: never answered.
    locks: str = "coherent"
    # ENOLCK: no lock daemon (fcntl(2)). ENOSYS: ll_file_noflock() of Lustre.
    lock_errno: int = errno.ENOLCK
    # flock(2): NFS clients take flock for a fcntl lock of the whole file, so LOCK_EX needs a writable descriptor.
    flock_is_fcntl: bool = True

    # nfs(5), `hard`: requests wait until the server is back. Begins at a moment of the seed in the first minute.
    outage_s: float = 0.0
    # The quota is full from a moment of the seed in the first minute, for this long.
    quota_full_s: float = 0.0
    # exports(5), root_squash: requests of root are those of nobody.
    root_squash: bool = False

    def scaled(self, scale: float) -> Kind:
        """Return the kind with all cache and buffer times multiplied by `scale`."""
        times = ("acregmin", "acregmax", "acdirmin", "acdirmax", "dirty_age")
        return dataclasses.replace(self, **{name: getattr(self, name) * scale for name in times})

    def but(self, settings: list[str]) -> Kind:
        """Return the kind with fields replaced, each given as FIELD=VALUE."""
        kinds = {field.name: type(getattr(self, field.name)) for field in dataclasses.fields(self)}
        changed: dict[str, object] = {}
        for setting in settings:
            name, found, value = setting.partition("=")
            if not found or name not in kinds:
                raise ValueError(f"{setting!r} is not FIELD=VALUE with a field of {sorted(kinds)}")
            kind = kinds[name]
            changed[name] = value in {"1", "true", "True"} if kind is bool else kind(value)
        return dataclasses.replace(self, **changed)  # type: ignore[arg-type]


_NFS3 = Kind("nfs3", lost_replies=0.01, late=0.02, very_late=0.001)
_LUSTRE = Kind(
    "lustre", strong=True, buffered=False, atomic_append=True, silly_rename=False, late=0.02,
    locks="refused", lock_errno=errno.ENOSYS, flock_is_fcntl=False,
)  # fmt: skip

KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "local", strong=True, buffered=False, late_errors=False, atomic_append=True, silly_rename=False,
            rename_flags=True, flock_is_fcntl=False,
        ),
        _NFS3,
        Kind("nfs4", lookup_refreshes_folder=False, open_by_name=True, late=0.02, very_late=0.001),
        # nolock is common where actimeo is raised: both make a slow server bearable.
        dataclasses.replace(
            _NFS3, name="nfs60", acregmin=60.0, acregmax=60.0, acdirmin=60.0, acdirmax=60.0, locks="local"
        ),
        dataclasses.replace(_LUSTRE, name="lustre_flock", locks="coherent"),
        _LUSTRE,
        dataclasses.replace(_NFS3, name="outage", outage_s=30.0),
        dataclasses.replace(_NFS3, name="quota", quota_full_s=30.0),
        dataclasses.replace(_NFS3, name="root_squash", root_squash=True),
        dataclasses.replace(
            _NFS3, name="all", lost_replies=0.02, late=0.05, very_late=0.002, outage_s=30.0, locks="refused"
        ),
    )
}  # fmt: skip


def kind_of(name: str, scale: float = 1.0, settings: list[str] | None = None) -> Kind:
    """Return the kind `name` with its times scaled and then fields replaced.

    Raises:
        ValueError: There is no kind of this name, or no such field.
    """
    if name not in KINDS:
        raise ValueError(f"{name!r} is not one of {sorted(KINDS)}")
    return KINDS[name].scaled(scale).but(settings or [])
