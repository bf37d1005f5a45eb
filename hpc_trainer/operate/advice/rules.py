"""All rules, in the order of docs/tune.md."""

from __future__ import annotations

from hpc_trainer.operate.advice import of_data, of_device, of_request, of_time
from hpc_trainer.operate.advice.facts import Facts
from hpc_trainer.operate.advice.rule import Advice, choose

RULES = (*of_data.RULES, *of_time.RULES, *of_device.RULES, *of_request.RULES)


def advice_of(facts: Facts) -> list[Advice]:
    """Return the advice of all rules for one run; [] if no gain is large enough.

    The largest gains of time come first, then gains of other resources.
    """
    found = [advice for rule in RULES for finding in rule.find(facts) if (advice := choose(facts, rule, finding))]
    return sorted(found, key=lambda advice: advice.rank)
