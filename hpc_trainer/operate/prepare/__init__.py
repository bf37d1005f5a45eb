"""`hpc-trainer data prepare`: raw pictures and texts -> what trains fast, piece by piece, each whole or not at all."""
