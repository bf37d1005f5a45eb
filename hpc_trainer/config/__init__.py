"""The configuration that the user asks for: typed, validated and composed by Hydra, without torch or Slurm."""
