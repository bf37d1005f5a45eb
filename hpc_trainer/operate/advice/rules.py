"""All rules, in the order of docs/tune.md."""

from __future__ import annotations

from hpc_trainer.operate.advice import of_data, of_device, of_request, of_time
from hpc_trainer.operate.advice.facts import Facts
from hpc_trainer.operate.advice.rule import Advice, advise

RULES = (*of_data.RULES, *of_time.RULES, *of_device.RULES, *of_request.RULES)


def advice_of(facts: Facts) -> list[Advice]:
    """What all rules say of one run, what gains the most time first; [] where nothing is worth a line."""
    return advise(facts, RULES)
