"""`model/`: models, one dataclass each; `_target_` names the class or the builder."""
