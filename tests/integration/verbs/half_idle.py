"""A program whose first rank works for two seconds, and whose others wait for nothing."""

import os
import time

end = time.monotonic() + 2.0
while time.monotonic() < end:
    if os.environ["RANK"] != "0" or time.process_time() > 1.0:
        time.sleep(0.1)
