"""`hpc-trainer drill`: interrupts a run that is at work, and looks whether it goes on where it must."""
