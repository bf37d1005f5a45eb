"""`hpc-trainer drill`: interruption of a running run, and a check that it resumes at the right step."""
