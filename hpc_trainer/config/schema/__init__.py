"""Schemas: one dataclass file for each group of `conf/`; `train.py` is the root that holds them all."""
