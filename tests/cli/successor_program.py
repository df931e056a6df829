"""A command that finds out whether anything of its predecessor is still at work."""

import fcntl
import json
import os
import sys
import time

at = time.time()
lock = os.open(os.path.join(sys.argv[1], "at-work"), os.O_RDWR | os.O_CREAT)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    alone = True
except BlockingIOError:
    alone = False
print(json.dumps({"alone": alone, "token": int(os.environ["FENCEPOST_TOKEN"]), "at": at}))
