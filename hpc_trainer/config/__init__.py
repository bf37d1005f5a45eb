"""What the person asks for: typed, validated, composed by Hydra. No torch, no Slurm."""
