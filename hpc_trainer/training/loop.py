"""The training loop: restore, then step, log, evaluate, save, until done or until all ranks agree to stop."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from typing import Any

from hpc_trainer.config.schema.optim import peak_lr
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.record.ledger import Kind
from hpc_trainer.runtime.devices import DeviceKind, kind_of
from hpc_trainer.runtime.pace import nearest_rank
from hpc_trainer.training.ability import GoBackError, overridden
from hpc_trainer.training.build import Training, open_training
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.data.loader import BatchIterator, on_device, stream_batches, train_batches
from hpc_trainer.training.evaluate import evaluate
from hpc_trainer.training.optim.build import set_momentum
from hpc_trainer.training.optim.schedule import learning_rate, momentum
from hpc_trainer.training.parallel.fully_sharded import buffers_shared
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import StepResult

# Speed of steps: time stamps of steps, and the metrics that are computed from them when metrics are logged.

WINDOW = 200
"""Number of newest steps from which quantiles are computed; more, up to `_MOST`, if more were done since the last line.

The ten steps between two lines would be too few: p95 and p99 would be the slowest of them."""
_MOST = 1_000
_QUANTILES = {"step_time_p50_s": 0.5, "step_time_p95_s": 0.95, "step_time_p99_s": 0.99}


class Speed:
    """Speed metrics of the steps between two logged ones, without evaluations but with saves. Not collective.

    One clock stamps each step: the host's on a CPU, the device's own on a GPU, whose stamps are read when metrics are
    logged. Nothing waits for the device: the loop has just read the loss from it, so all steps so far are done.

    Args:
        step: optimizer steps done before the first step that counts.
        batches: has the seconds that this rank waited for batches, and the shapes of a batch.
        batch_size: samples of a step, on all ranks.
        kind: kind of the device that runs the steps.
    """

    def __init__(self, step: int, batches: BatchIterator, *, batch_size: int, kind: DeviceKind | None = None) -> None:
        self._batches, self._batch_size = batches, batch_size
        self._kind = kind_of("cpu") if kind is None else kind
        self._stamps = deque[Any](maxlen=_MOST + 1)
        self._seconds = deque[float](maxlen=_MOST)
        self._is_warm = False
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin the next metrics with the steps after this one."""
        self._step, self._wait_s, self._time = step, self._batches.wait_s, time.perf_counter()
        self._stamps.clear()
        self.end_step()

    def end_step(self) -> None:
        """Stamp the end of a step that was launched."""
        if self._kind.has_stamps:
            self._stamps.append(self._kind.stamp())

    def figures(self, step: int) -> dict[str, float]:
        """Return the speed metrics of the steps since the last call (or `restart`) up to `step`.

        steps_per_s, step_time_s (its inverse); samples_per_s of all ranks; tokens_per_s if targets are sequences of
        tokens; data_wait_s, the seconds per step that this rank waited for batches, and data_wait_share, their share of
        the step (0 to 1). step_time_p50_s, p95, p99: quantiles of these steps and of earlier ones up to `WINDOW` steps,
        without the very first step, in which caches fill and compilers work; left out if the device has no clock.
        """
        num_steps, seconds = max(1, step - self._step), max(1e-9, time.perf_counter() - self._time)
        waited_s = (self._batches.wait_s - self._wait_s) / num_steps
        step_s = seconds / num_steps
        samples_per_s = self._batch_size / step_s
        values = {"steps_per_s": 1 / step_s, "step_time_s": step_s, **self._quantiles(), "samples_per_s": samples_per_s}
        if self._batches.tokens_per_sample is not None:
            values["tokens_per_s"] = samples_per_s * self._batches.tokens_per_sample
        values |= {"data_wait_s": waited_s, "data_wait_share": min(1.0, waited_s / step_s)}
        self.restart(step)
        return values

    def _quantiles(self) -> dict[str, float]:
        newest = list(itertools.starmap(self._kind.seconds_between, itertools.pairwise(self._stamps)))
        if newest and not self._is_warm:
            self._is_warm = True
            del newest[0]
        self._seconds += newest
        counted = sorted(itertools.islice(reversed(self._seconds), max(WINDOW, len(newest))))
        quantiles = ((name, nearest_rank(counted, share)) for name, share in _QUANTILES.items())
        return {name: value for name, value in quantiles if value is not None}


def train(config: TrainConfig, run: RunContext) -> None:
    """Train until `train.num_steps`, or until any rank was asked to stop. Collective. The `main` of most runs.

    Either way everything is saved: a run that is started again continues with the same bits.
    """
    with open_training(config, run) as training:
        _train(config, run, training)


def _train(config: TrainConfig, run: RunContext, training: Training) -> None:
    state = training.state
    state.resume(run.restore(**state.objects()))
    with run.spans.within(Kind.restore):
        for ability in training.abilities:
            ability.restored()
    while True:
        with run.spans.within(Kind.start_up):
            batches = open_batches(config, training)
        batches.spans = run.spans
        try:
            run.restore_rng()  # building a loader may draw from the random state
            _run_steps(config, run, training, batches)
            return
        except GoBackError as error:
            go_back = error.go_back
        finally:
            with run.spans.within(Kind.shutdown):
                batches.close()
        go_back()


def open_batches(config: TrainConfig, training: Training) -> BatchIterator:
    """Open the batches from the state's step on, without those that the guard left out."""
    offset = training.state.guard.offset
    layout: dict[str, Any] = {
        "rank": training.mesh.data_rank,
        "world_size": training.mesh.num_data_ranks,
        "micro_batch_size": training.sizes.micro_batch_size,
        "grad_accum_steps": training.stepper.grad_accum_steps,
        "num_workers": config.data.num_workers if training.stepper.needs_data else 0,
        "num_shares": training.stepper.num_shares,
    }
    if training.order is None:
        loaded = stream_batches(training.train_set, config.train.global_batch_size, num_left_out=offset, **layout)
    else:
        loaded = train_batches(
            training.train_set,
            training.order,
            first_step=training.state.step + offset,
            num_steps=config.train.num_steps + offset,
            **layout,
        )
    return on_device(loaded, training.stepper.device)


def _run_steps(config: TrainConfig, run: RunContext, training: Training, batches: BatchIterator) -> None:
    state, num_steps = training.state, config.train.num_steps
    after_steps, to_log, checks = (overridden(training.abilities, hook) for hook in ("after_step", "logged", "check"))
    for check in checks:
        check(state.step)
    is_evaluation_due = 0 < state.step < num_steps and _is_due(state.step, config.train.eval_every_steps)
    # The last attempt may have been stopped between save and evaluation, or between evaluation and end.
    if is_evaluation_due and not _goes_on(run, training, run.last_evaluation() or _evaluate(config, run, training)):
        return
    _mark_best(run, state)
    if run.pauses_at(state.step):
        run.pause_here(state.step, **state.objects())
        return
    kind = kind_of(training.stepper.device)
    speed = Speed(state.step, batches, batch_size=config.train.global_batch_size, kind=kind)
    peak = peak_lr(config.optim, config.train.global_batch_size)
    while state.step < num_steps:
        lr = learning_rate(config.schedule, peak, state.step, num_steps)
        set_momentum(state.optimizer, momentum(config.schedule, state.step, num_steps))
        with run.spans.within(Kind.step, state.step):
            result = training.stepper.step(state, batches, lr=lr, wish_to_stop=run.stop.is_set)
        state.step += 1
        state.samples_seen += config.train.global_batch_size
        for after_step in after_steps:
            after_step(state.step)
        speed.end_step()

        if _is_due(state.step, config.monitor.log_every_steps, num_steps):
            values = _step_metrics(run, result, lr) | speed.figures(state.step) | state.guard.figures()
            for logged in to_log:
                logged(state.step, values)
            speed.restart(state.step)  # the time of these hooks is no part of a step
            run.log(state.step, values)
            state.guard.check(state.step, state.scaler)
        else:
            run.heartbeat(state.step)
        if state.step < num_steps and result.should_stop:
            run.stop_here(state.step, **state.objects())
            return
        for check in checks:
            check(state.step)
        if state.step < num_steps and run.should_save(state.step):
            run.save_in_background(state.step, **state.objects())  # before an evaluation: a kill in it loses nothing
        if state.step < num_steps and _is_due(state.step, config.train.eval_every_steps):
            if not _goes_on(run, training, _evaluate(config, run, training)):
                return
            _mark_best(run, state)
            speed.restart(state.step)
        if state.step < num_steps and run.pauses_at(state.step):
            run.pause_here(state.step, **state.objects())
            return

    run.save(state.step, **state.objects())  # before the evaluation: a kill in it loses nothing
    metrics = _evaluate(config, run, training)
    if metrics:
        run.finish(metrics)


def _goes_on(run: RunContext, training: Training, metrics: dict[str, float] | None) -> bool:
    """Return False if the evaluation was stopped, or if a feature ends the run after it. Collective."""
    state = training.state
    if metrics is None:
        return False
    reasons = [evaluated(state.step, metrics) for evaluated in overridden(training.abilities, "evaluated")]
    reason = next(filter(None, run.group.broadcast(reasons) if reasons else ()), None)
    if reason is not None:
        run.save(state.step, **state.objects())
        run.finish(metrics, reason)
    return reason is None


def _mark_best(run: RunContext, state: TrainState) -> None:
    """Put the best metric into the state, and keep the checkpoint of its step. Collective."""
    if run.keep_best is not None:
        state.best_metric = run.save_best(state.step, **state.objects())


def _is_due(step: int, every_steps: int, last_step: int | None = None) -> bool:
    return (every_steps > 0 and step % every_steps == 0) or step == last_step


def _evaluate(config: TrainConfig, run: RunContext, training: Training) -> dict[str, float] | None:
    """Evaluate and log; return None if all ranks agreed to stop meanwhile, after everything is saved."""
    step = training.state.step
    with run.spans.within(Kind.evaluation, step), contextlib.ExitStack() as around:
        for ability in training.abilities:
            around.enter_context(ability.evaluating())
        around.enter_context(buffers_shared(training.state.model, training.mesh.data_groups()))
        metrics = _figures(config, run, training)
    if metrics is None:
        run.stop_here(step, **training.state.objects())
        return None
    run.log(step, metrics)
    return metrics


def _figures(config: TrainConfig, run: RunContext, training: Training) -> dict[str, float] | None:
    """Return the metrics of the run's own held-out samples and of the further sets; None if stopped."""
    step, metrics = training.state.step, dict[str, float]()
    for name, samples in {"": training.eval_set, **training.eval_beside}.items():
        values = evaluate(
            training.stepper.for_evaluation(training.state.model),
            samples,
            task=training.task,
            group=run.group,
            batch_size=training.sizes.eval_batch_size,
            precision=config.precision,
            should_stop=run.evaluation_vote(step),
            num_shares=training.stepper.num_shares,
            seed=config.seed,
            step=step,
            mesh=training.mesh,
        )
        if values is None:
            return None
        metrics |= {_of_set(name, metric): value for metric, value in values.items()}
    return metrics


def _of_set(name: str, metric: str) -> str:
    """Return a metric's name in a set: `eval_loss` of the set `old` is `eval_old_loss`; unchanged without a set."""
    return f"eval_{name}_{metric.removeprefix('eval_')}" if name else metric


def _step_metrics(run: RunContext, result: StepResult, lr: float) -> dict[str, float]:
    """Return loss (mean over all ranks), learning rate and gradient norm. Collective; waits for the device."""
    metrics = {"loss": result.mean_loss(run.group), "lr": lr}
    if result.grad_norm is not None:
        metrics["grad_norm"] = result.grad_norm.item()
    return metrics
