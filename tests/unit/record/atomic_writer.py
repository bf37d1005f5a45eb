"""Started by test_files.py, and killed: replaces a file again and again by texts of one letter each.

python atomic_writer.py FILE SIZE
"""

from __future__ import annotations

import sys
from pathlib import Path

from hpc_trainer.record.files import write_atomic


def main() -> None:
    path, size = Path(sys.argv[1]), int(sys.argv[2])
    while True:
        for letter in "abcdefgh":
            write_atomic(path, letter * size)


if __name__ == "__main__":
    main()
