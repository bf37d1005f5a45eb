"""The sets that the states of a run belong to."""

from __future__ import annotations

from hpc_trainer.record.states import RunState


def test_each_state_is_active_failed_interrupted_or_none_of_these() -> None:
    sets = {
        state.value: [name for name in ("is_active", "has_failed", "is_interrupted") if getattr(state, name)]
        for state in RunState
    }
    assert [state for state, names in sets.items() if not names] == ["NEW", "COMPLETED", "CANCELLED", "GONE", "PAUSED"]
    assert all(len(names) <= 1 for names in sets.values())


def test_submit_leaves_what_has_failed_and_what_somebody_has() -> None:
    again = {state for state in RunState if state.needs_submit}
    assert again == {RunState.NEW, *(state for state in RunState if state.is_interrupted)}
