"""`hpc-trainer certify`: a run that is interrupted must become the one that is not. The ranks: `worker/probe.py`."""
