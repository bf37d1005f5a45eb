"""`hpc-trainer report`: a sweep as data, and as one page with charts."""
