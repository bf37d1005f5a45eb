"""Features: one folder for each thing that a run may be asked for beside the core. Only the folder imports itself.

    __init__.py    FEATURE, its declaration (config/table/feature.py): no torch, read at plan time
    NAME.py        ABILITY, what it does to a run (training/ability.py)
    others         whatever it needs for that

A new feature is such a folder, and its key in `config/schema/` (docs/contributing.md). The core calls its hooks. Its
declaration is read for refusals at plan time, the docs' matrix and the test of all pairs.
"""
