"""A program whose first rank works, and whose others wait for its end: `half_idle.py FOLDER`."""

import os
import sys
import time
from pathlib import Path

done = Path(sys.argv[1]) / "half_idle.done"
if os.environ["RANK"] == "0":
    while time.process_time() < 0.8:
        pass
    time.sleep(1.0)
    done.touch()
while not done.exists():
    time.sleep(0.5)
