"""One folder a feature: what a run may be asked for beside the core. Nobody imports one by name but itself.

    __init__.py    FEATURE, its declaration (config/table/feature.py): no torch, read at plan time
    ability.py     ABILITY, what it does to a run (training/ability.py)
    others         whatever it needs for that

A new one is such a folder, and its key in `config/schema/` (docs/contributing.md). The core calls its hooks, and its
declaration is read for refusals at plan time, the docs' matrix and the test of all pairs.
"""
