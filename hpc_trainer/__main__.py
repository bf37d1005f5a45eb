"""`python -m hpc_trainer` is the command `hpc-trainer`."""

from hpc_trainer.cli.main import main

if __name__ == "__main__":
    main()
