"""What a process runs in: packages, machine, devices, code. No torch: it is asked where it is loaded."""
