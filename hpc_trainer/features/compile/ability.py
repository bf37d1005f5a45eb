"""Compilation in a run: compiled code comes from the sweep's cache, and is saved there after the first step."""

from __future__ import annotations

import contextlib

from torch import nn

from hpc_trainer.config.schema.train import CompileScope
from hpc_trainer.features.compile.cache import CompileCache, open_cache
from hpc_trainer.features.compile.graphs import compilations_within, compile_step, uncompiled
from hpc_trainer.models.parts import check_has_blocks
from hpc_trainer.record.ledger import Kind
from hpc_trainer.training.ability import Ability, Building


class CompileAbility(Ability):
    _cache: CompileCache | None = None
    _stack: contextlib.ExitStack | None = None

    def see_whole(self, model: nn.Module, building: Building) -> None:
        if self.config.train.compile_scope is CompileScope.blocks:
            check_has_blocks(model, "train.compile_scope=blocks compiles blocks", "train.compile_scope=model")

    def on_loss(self, loss: nn.Module, building: Building) -> None:
        """Compile the step. Collective.

        An estimate counts the uncompiled step.
        """
        if building.run is not None:
            self._cache = open_cache(self.config, building.run)
            compile_step(loss, self.config.train)
            spans = building.run.spans
            self._stack = contextlib.ExitStack()
            self._stack.enter_context(compilations_within(lambda: spans.within(Kind.compile)))

    def trying(self) -> contextlib.AbstractContextManager[None]:
        return uncompiled()

    def after_step(self, step: int) -> None:
        if self._cache is not None:
            self._cache.save_once()

    def close(self, error: BaseException | None) -> None:
        if self._stack is not None:
            self._stack.close()
        if self._cache is not None:
            self._cache.close()


ABILITY = CompileAbility
