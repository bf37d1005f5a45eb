"""``python -m tests.slurm.shared_folder.campaign --kind nfs3``: a sweep on a shared folder, disturbed all the while.

A seeded script kills ranks, nodes and commands, preempts and requeues, while other commands submit, retry, cancel and
look through the login shell's mount. At the end the server's disk must hold each run once, with the undisturbed bits,
and what `status` has shown all the while must have been true. Prints one row of a table.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import warm
from tests.slurm.scenarios.checks import Reference
from tests.slurm.scenarios.scene import NUM_STEPS, Run, Scene
from tests.slurm.shared_folder.watch import Falsehood, Watcher, falsehoods
from tests.slurm.soak import Soak
from tests.slurm.testbed import bed
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.spec import SharedFolder, Spec

_NODE_CLOCKS_S, _SERVER_CLOCK_S = (45, -60, 90, -90), 30
_AT_ONCE = 4  # commands; more would leave the runs no core
_COMMAND_S = 300.0
_CANCEL_S = 90.0  # within which a cancel is obeyed
_BRING_BACK_S = 10.0  # between two `status` for runs that no longer come back by themselves: 2 s of a core each
_FAULTS = {"outage": "outage", "all": "outage", "quota": "quota"}
_FAULT_S, _FAULT_RATE = 30.0, 0.1
_KILLS = ("preempt", "kill a rank", "requeue by hand", "warn", "node down", "power cut")
_COLUMNS = (
    "kind", "seed", "minutes", "runs", "blows", "interrupted attempts", "commands", "killed commands", "cancelled",
    "lost", "doubled", "other bits", "false states", "late states", "errors", "slow cancels",
)  # fmt: skip


@dataclass
class Command:
    """A command of a user that is on its way."""

    words: tuple[str, ...]
    process: Any
    output: Path
    deadline: float
    killed_at: float | None


@dataclass
class Campaign(Soak):
    """The soak, with commands at the same time, and counts in place of the first failure."""

    plain: SlurmCluster | None = None
    """A cluster without a shared folder, for the undisturbed runs."""
    max_kills: int = 1_000_000
    num_trained: int = 2
    """How many runs of the shared loop there are on one rank, and as many on four; all others are of a program."""
    commands: Counter[str] = field(default_factory=Counter)
    num_killed: int = 0
    errors: list[str] = field(default_factory=list)
    cancel_times: dict[Path, float] = field(default_factory=dict)
    slow_cancels: list[str] = field(default_factory=list)
    pause_s: float = 4.0
    _fault_until: float = 0.0
    _brought_back_at: float = 0.0
    _under_way: list[Command] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """How often something was killed or interrupted."""
        return sum(self.blows[name] for name in _KILLS) + self.num_killed

    def _scenes(self, slurm: SlurmCluster, prefix: str = "") -> Iterator[tuple[Scene, tuple[int, ...]]]:
        """Yield each array to be submitted, with its seeds: a program, and the shared loop on one and four ranks."""
        for name, hardware, num_runs in (
            ("program", "testbed_x1", self.num_runs - 2 * self.num_trained),
            ("x1", "testbed_x1", self.num_trained),
            ("x4", "testbed_x4", self.num_trained),
        ):
            if num_runs > 0:
                scene = Scene(slurm, self._folder(f"{prefix}{name}"), hardware, is_program=name == "program")
                yield scene, tuple(range(num_runs))

    def submit(self) -> None:
        """So slow that each array lasts for as long as the blows do; a training takes two batches a step."""
        for scene, seeds in self._scenes(self.slurm):
            at_once = min(len(seeds), 8)
            pace_s = self.seconds / NUM_STEPS * at_once / len(seeds) / (1 if scene.is_program else 2) / 2
            words = (f"cluster.array_parallelism={at_once}",)
            scene.submit(*words, partition="preempt", pace_s=pace_s, seeds=seeds)
            self.scenes.append(scene)
            self.say(f"{len(seeds)} run(s) of {scene.folder.name}, {pace_s:.3f} s a batch")

    def _folder(self, name: str) -> Path:
        folder = self.folder / f"{self.seed}-{name}"
        folder.mkdir()
        return folder

    def references(self) -> dict[tuple[str, int], Reference]:
        """The undisturbed runs, on this machine's own disk."""
        kept = {}
        for scene, seeds in self._scenes(self.plain or self.slurm, "undisturbed-"):
            scene.submit("cluster.array_parallelism=2", pace_s=0, seeds=seeds)
            scene.wait_until_done(timeout_s=900)
            name = scene.folder.name.removeprefix(f"{self.seed}-undisturbed-")
            kept |= {(name, run.seed): Reference.of(run) for run in scene.runs}
        return kept

    def _kept_of(self, kept: dict[tuple[str, int], Reference], scene: Scene, run: Run) -> Reference:
        return kept[scene.folder.name.removeprefix(f"{self.seed}-"), run.seed]

    # When

    def blow(self) -> None:
        """Disturb the runs, and let users give commands meanwhile."""
        for _ in range(self.random.choice((1, 1, 2, 3))):
            self._begin_command()
        self._begin_fault()
        # Several at once: a rank is killed while the rank next to it, or its node, goes too.
        for _ in range(self.random.choice((0, 1, 2, 3))):
            name, disturb = self.random.choice((("kill a rank", self._kill_rank), ("requeue by hand", self._requeue)))
            if (what := disturb()) is not None:
                self.blows[name] += 1
                self.say(f"{name}: {what}")
        super().blow()

    def _bring_back(self, scene: Scene) -> None:
        if time.monotonic() > self._brought_back_at + _BRING_BACK_S:
            self._brought_back_at = time.monotonic()
            super()._bring_back(scene)

    def _begin_fault(self) -> None:
        """Let the server be away, or its quota be full, for a while: where the kind plays that."""
        share = self.slurm.spec.share
        fault = _FAULTS.get(share.kind) if share else None
        now = time.time()
        if fault is None or now < self._fault_until + 2 * _FAULT_S or self.random.random() > _FAULT_RATE:
            return
        self._fault_until = now + _FAULT_S
        self.slurm.set_faults(**({"outage_until": self._fault_until} if fault == "outage" else {"full": "EDQUOT"}))
        self.blows[fault] += 1
        self.say(f"{fault} of {_FAULT_S:g} s")

    def _end_fault(self) -> None:
        if self._fault_until and time.time() > self._fault_until:
            self.slurm.set_faults()

    def _begin_command(self) -> None:
        if len(self._under_way) >= _AT_ONCE:
            return
        scene = self.random.choice(self.scenes)
        kept = [run for run in scene.runs if run.folder not in self.cancelled]
        if not kept:
            return
        words: tuple[str, ...] = self.random.choice(
            (
                ("submit", "cluster=testbed", *scene.words, "sweep_name=scene"),
                ("submit", "cluster=testbed", *scene.words, "sweep_name=scene", "--retry-failed"),
                ("retry", self.random.choice(kept).folder.name, "--sweep", "scene"),
                ("status", "scene"),
                ("why", self.random.choice(kept).folder.name, "--sweep", "scene"),
                ("results", "scene"),
            )
        )
        output = self.folder / f"command-{sum(self.commands.values()):04}.log"
        with output.open("wb") as sink:
            process = warm.Popen(
                [sys.executable, "-m", "hpc_trainer", *words],
                cwd=scene.folder, env=scene.driver.env, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        now = time.monotonic()
        killed_at = now + self.random.uniform(0.2, 3) if self.random.random() < 0.3 else None
        self._under_way.append(Command(words, process, output, now + _COMMAND_S, killed_at))
        self.commands[words[0]] += 1

    def _tend_commands(self) -> None:
        now = time.monotonic()
        for command in list(self._under_way):
            ended = command.process.poll() is not None
            if not ended and (now > command.deadline or (command.killed_at is not None and now > command.killed_at)):
                command.process.kill()
                command.process.wait()
                if now > command.deadline:
                    self._complain(f"{command.words[0]} did not end within {_COMMAND_S:g} s", command.output)
                self.num_killed += 1
            elif not ended:
                continue
            elif command.process.returncode not in (0, 1, 2, -signal.SIGKILL):
                self._complain(f"{command.words[0]} ended with {command.process.returncode}", command.output)
            elif "Traceback" in command.output.read_text(errors="replace"):
                self._complain(f"{command.words[0]} raised", command.output)
            self._under_way.remove(command)

    def _complain(self, what: str, output: Path) -> None:
        self.errors.append(what)
        self.say(f"ERROR {what}:\n{output.read_text(errors='replace')[-2000:]}")

    def tend(self) -> None:
        """As in the soak; commands end or are killed, and cancelled jobs have a time to leave."""
        self._tend_commands()
        self._end_fault()
        try:
            super().tend()
        except (AssertionError, subprocess.TimeoutExpired) as error:  # a command of a user that failed
            if "another submit works on" not in str(error):  # several of its users submit at the same time
                self.errors.append(str(error)[:300])
            self.say(f"ERROR {str(error)[:3000]}")
        queue = self.queue()
        for scene, run in self.runs():
            since = self.cancel_times.get(run.folder)
            if since is None or queue.get(run.job_id, ("",))[0] != "RUNNING":
                self.cancel_times.pop(run.folder, None)
            elif time.monotonic() - since > _CANCEL_S:
                self.slow_cancels.append(f"{scene.hardware} {run.job_id}")
                del self.cancel_times[run.folder]

    def cancel_one(self) -> None:
        """As in the soak; when it was is kept."""
        before = set(self.cancelled)
        try:
            super().cancel_one()
        except AssertionError as error:  # a full quota or a server that is away refuses it; a user tries again
            self.say(f"cancel: {str(error)[-300:]}")
        self.cancel_times |= dict.fromkeys(self.cancelled - before, time.monotonic())

    def play(self) -> None:
        """The whole of it; the row is printed at the end."""
        self.say(f"seed {self.seed}")
        kept = self.references()
        self.submit()
        watched = [(scene.driver, "scene") for scene in self.scenes]
        with Watcher(self.folder / "looks.jsonl", *watched) as watcher:
            begin = time.monotonic()
            marks = sorted(self.random.uniform(0.1, 0.8) * self.seconds for _ in range(self.num_cancelled))
            while time.monotonic() < begin + self.seconds and self.left() and self.kills < self.max_kills:
                if marks and time.monotonic() - begin > marks[0]:
                    before = len(self.cancelled)
                    self.cancel_one()
                    del marks[: len(self.cancelled) - before]
                self.blow()
                for _ in range(4):
                    time.sleep(self.pause_s / 4)
                    self.tend()
            self.say(f"no more blows: {dict(self.blows)}; {len(self.left())} runs left")
            try:
                self._drain()
            except AssertionError as error:
                self.say(f"ERROR {error}")
            shown = self._settled()
        while self._under_way:
            time.sleep(0.2)
            self._tend_commands()
        self._tell(kept, shown, falsehoods(watcher.looks(), self.slurm.cache_age_s), time.monotonic() - begin)

    def _settled(self) -> dict[Path, str]:
        """What `status` shows in the end, when no client may be late any more."""
        deadline = time.monotonic() + self.slurm.cache_age_s + 10
        while True:
            rows = {scene.folder: scene.driver.status("scene") for scene in self.scenes}
            shown = {run.folder: str(rows[scene.folder][run.folder.name]["state"]) for scene, run in self.runs()}
            if all(state == self._wanted(folder) for folder, state in shown.items()) or time.monotonic() > deadline:
                return shown
            time.sleep(2)

    def _wanted(self, folder: Path) -> str:
        return "CANCELLED" if folder in self.cancelled else "COMPLETED"

    # Then

    def _tell(
        self,
        kept: dict[tuple[str, int], Reference],
        shown: dict[Path, str],
        wrong: list[Falsehood],
        seconds: float,
    ) -> None:
        lost = [run for _, run in self.runs() if shown[run.folder] != self._wanted(run.folder)]
        different = [
            run for scene, run in self.runs() if run.is_done and Reference.of(run) != self._kept_of(kept, scene, run)
        ]
        doubled = [str(mark) for scene in self.scenes for mark in scene.gates.glob("two_at_once")]
        doubled += [run.folder.name for _, run in self.runs() if _is_doubled(run)]
        for scene in self.scenes:
            again = scene.submit_again("--retry-failed")["submitted"]
            if again:
                self.errors.append(f"submit again submitted {again}")
        late = [each for each in wrong if each.is_late]
        for scene, run in self.runs():
            if run in different:
                self.say(_difference(run, self._kept_of(kept, scene, run)))
        for run in lost:
            self.say(f"LOST {run.folder.name}: {shown[run.folder]}")
        for what, found in (
            ("DOUBLED", doubled),
            ("OTHER BITS", different),
            ("STATE", wrong),
            ("SLOW", self.slow_cancels),
        ):
            for each in found:
                self.say(f"{what} {each}")
        # A node that goes takes all runs on it: what was interrupted is more than what was done.
        interrupted = sum(len(run.records("start")) - run.is_done for _, run in self.runs())
        share = self.slurm.spec.share
        values = (
            share.kind if share else "own disk", self.seed, f"{seconds / 60:.1f}", len(self.runs()), self.kills,
            interrupted,
            sum(self.commands.values()), self.num_killed, len(self.cancelled), len(lost), len(doubled), len(different),
            len(wrong) - len(late), len(late), len(self.errors), len(self.slow_cancels),
        )  # fmt: skip
        self.say(f"blows {dict(self.blows)}, commands {dict(self.commands)}, {self.brought_back} brought back")
        print(f"| {' | '.join(_COLUMNS)} |\n| {' | '.join(map(str, values))} |", flush=True)
        self.has_failed = any(values[-7:])

    has_failed: bool = False


def _difference(run: Run, kept: Reference) -> str:
    """Return the lines of metrics that differ, how the final weights do, and the journal of a run; its folder goes."""
    only = [
        f"{whose} {line}"
        for whose, mine, others in (("undisturbed:", kept.metrics, run.metrics), ("here:", run.metrics, kept.metrics))
        for line in mine
        if line not in others
    ]
    weights = "the same" if run.final_state == kept.final_state else "others"
    counts = f"{len(run.metrics)} lines of metrics and {len(kept.metrics)} undisturbed"
    journal = [str(record) for kind in ("start", "resume", "end") for record in run.records(kind)]
    files = [
        f"{path.relative_to(run.folder)} {path.stat().st_size} {path.stat().st_mtime:.2f}"
        for path in sorted(run.folder.rglob("*"))
        if path.is_file()
    ]
    told = [f"{path.name}: {path.read_text(errors='replace')[-3000:]}" for path in sorted(run.folder.rglob("told/*"))]
    lines = (run.folder / "metrics.jsonl").read_text(errors="replace").splitlines()
    return "\n".join([f"{run.folder.name}: weights {weights}, {counts}", *only[:20], *journal, *files, *told, *lines])


def _is_doubled(run: Run) -> bool:
    """Return True if the run completed twice, or two attempts are of one incarnation of a job."""
    starts = [(record["job_id"], record["restart_count"]) for record in run.records("start")]
    done = [record for record in run.records("end") if record["cause"] == "done"]
    return len(set(starts)) < len(starts) or len(done) > 1


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.shared_folder.campaign", description=__doc__)
    parser.add_argument("--kind", default="nfs3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long the blows last at most")
    parser.add_argument("--kills", type=int, default=1_000_000, help="after so many the blows end")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--trained", type=int, default=2, help="how many train on one rank, and on four")
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between two blows")
    parser.add_argument("--cancelled", type=int, default=3, help="how many runs are cancelled")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="replace a field of the kind")
    parser.add_argument("--same-clock", action="store_true", help="the clocks of nodes are not apart")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the clusters are taken down
    share = SharedFolder(
        options.kind, options.seed,
        server_clock_s=0 if options.same_clock else _SERVER_CLOCK_S,
        node_clocks_s=() if options.same_clock else _NODE_CLOCKS_S,
        settings=tuple(options.set),
    )  # fmt: skip
    specs = [Spec(), Spec(share=share)]
    started = [spec for spec in specs if bed.up(spec, lambda text: print(text, file=sys.stderr))]
    plain, shared = map(SlurmCluster.attach, specs)
    try:
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            campaign = Campaign(
                shared, Path(folder), options.runs, options.minutes * 60, options.seed, options.cancelled,
                plain=plain, max_kills=options.kills, num_trained=options.trained, pause_s=options.pause,
            )  # fmt: skip
            campaign.play()
    finally:
        for spec, cluster in zip(specs, (plain, shared), strict=True):
            cluster.tidy()
            if spec in started:
                bed.down(spec)
    return int(campaign.has_failed)


if __name__ == "__main__":
    sys.exit(_main())
