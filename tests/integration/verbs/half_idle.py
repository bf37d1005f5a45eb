"""A program whose first rank works for a second of five, and whose others wait for nothing."""

import os
import time

end = time.monotonic() + 5.0
while time.monotonic() < end:
    if os.environ["RANK"] != "0" or time.process_time() > 1.2:
        time.sleep(0.1)
