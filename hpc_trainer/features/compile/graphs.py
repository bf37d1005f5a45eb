"""torch.compile for the step: the model and its loss as one, or each block by itself. Imports torch._dynamo."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch._dynamo.callback
import torch._functorch.config
from torch import nn

from hpc_trainer.config.schema.train import CompileMode, CompileScope, LoopConfig, Recompute
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.parts import blocks
from hpc_trainer.models.transformer import in_own_stream
from hpc_trainer.runtime.devices import kinds_in_use

# Names of the modes for torch.compile.
_MODES = {
    CompileMode.default: None,
    CompileMode.reduce_overhead: "reduce-overhead",
    CompileMode.max_autotune: "max-autotune",
}
# Graphs of one piece of code that torch keeps before it gives up compiling it, without an error (its default is 8): a
# ResNet's blocks of eight shapes are one piece of code.
_SPARE_GRAPHS = 8


class _CompiledForward:
    """Replacement of a module's `forward`: compiled while the module trains, uncompiled while it evaluates.

    So the smaller last batch of an evaluation compiles nothing. Shapes are fixed (`dynamic=False`): training batches
    are all of one size. A deep copy of the module runs on its own weights.
    """

    is_off: ClassVar[bool] = False

    def __init__(self, module: nn.Module, compiled: Any) -> None:
        self._module, self._compiled = module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        forward = self._compiled if module.training and not self.is_off else type(module).forward
        return forward(module, *args, **kwargs)


class _DrawsNothing(_CompiledForward):
    """Compiled forward whose first training pass must draw no random numbers.

    Recomputation under a memory budget draws new numbers, and the gradient is that of another dropout mask (torch 2.13,
    pytorch issue 190758).
    """

    _is_checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_checked or self.is_off or not self._module.training:
            return super().__call__(*args, **kwargs)
        before = _random_states()
        result = super().__call__(*args, **kwargs)
        if not all(map(torch.equal, before, _random_states())):
            raise ConfigError(
                "train.recompute=budget computes parts of the model again, and this model draws random numbers, as "
                "for dropout: the second time they would be different. Remove them, or use train.recompute=full "
                "train.compile_scope=blocks."
            )
        self._is_checked = True
        return result


def _random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(kind.rng_state() for kind in kinds_in_use())]


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled code uncompiled within the context, for trials of many shapes."""
    _CompiledForward.is_off = True
    try:
        yield
    finally:
        _CompiledForward.is_off = False


def compile_step(loss: nn.Module, config: LoopConfig) -> None:
    """Make `loss`, the model with its loss, or the model's blocks compile at their first step, in place.

    Names of weights stay. Call this after `share_layers`, and before `recompute_blocks`, DDP and FSDP, which then see
    calls of whole blocks.
    """
    modules = [loss] if config.compile_scope is CompileScope.model else list(blocks(loss))
    is_budgeted = config.recompute is Recompute.budget
    torch._functorch.config.activation_memory_budget = config.recompute_budget if is_budgeted else 1.0
    # torch 2.13 asks a block's input for its gradient, and warns of that itself.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    torch._dynamo.decorators.skip(in_own_stream)  # it reads a number: a layer that draws there is a graph of its own
    # Blocks of one class share their graphs if they are alike: weights are inputs of a graph.
    compiled = {
        kind: torch.compile(kind.forward, dynamic=False, mode=_MODES[config.compile_mode])
        for kind in {type(module) for module in modules}
    }
    for module in modules:
        forward: Any = (_DrawsNothing if is_budgeted else _CompiledForward)(module, compiled[type(module)])
        module.forward = forward
    limit = len(modules) + _SPARE_GRAPHS
    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)


@contextlib.contextmanager
def compilations_within(span: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Record each compilation during the block as a separate span: the first, later ones, lazy backward passes.

    torch reports compilations one at a time; those inside another one belong to it.
    """
    open_span = contextlib.ExitStack()

    def begin(args: Any) -> None:
        del args
        open_span.enter_context(span())

    def end(args: Any) -> None:
        del args
        open_span.close()

    callbacks = torch._dynamo.callback.callback_handler
    callbacks.register_start_callback(begin)
    callbacks.register_end_callback(end)
    try:
        yield
    finally:
        callbacks.remove_start_callback(begin)
        callbacks.remove_end_callback(end)


def graph_counts() -> dict[str, int]:
    """Return counts of this process: `graphs` in all, those from a cache (`cached`), and those compiled here (`made`).

    `failed`: frames that torch gave up on and runs uncompiled.
    """
    counters = torch._dynamo.utils.counters
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "cached": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
        "made": counters["inductor"]["fxgraph_cache_miss"],
        "failed": counters["frames"]["total"] - counters["frames"]["ok"],
    }
