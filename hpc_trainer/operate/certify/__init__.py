"""`hpc-trainer certify`: check that an interrupted run ends with the same bits as an undisturbed one.

Its ranks run `worker/probe.py`.
"""
