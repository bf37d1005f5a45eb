"""A real Slurm whose login shell and nodes are different clients of one shared folder."""
