"""Features: one folder for each training technique. No code outside a folder imports it by name.

    __init__.py    its keys, and FEATURE, its declaration (config/table/feature.py): no torch, read at plan time
    NAME.py        ABILITY, its hooks on a rank (training/ability.py)
    others         code of its own that is long, late or run in a process of its own

A new feature is such a folder, and a line for each key in the key's section (docs/contributing.md). The core calls its
hooks. Its declaration is read for refusals at plan time, the docs' matrix and the test of all pairs.
"""
