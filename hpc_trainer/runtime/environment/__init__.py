"""Environment of a process: packages, machine, devices, code. torch is queried if it is loaded, never imported."""
