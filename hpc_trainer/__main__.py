"""`python -m hpc_trainer` is the command `hpc-trainer`."""

from hpc_trainer.runtime.start import put_current_folder_last

if __name__ == "__main__":
    put_current_folder_last()
    from hpc_trainer.cli.main import main

    main()
