"""How far the clocks of hosts may be apart."""

CLOCKS_S = 600.0
"""By this much clocks of login nodes and nodes may differ; no controller comes to the same job id again as soon."""
