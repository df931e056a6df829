"""A command that notes when it begins, and whether anything of its predecessor beats after that."""

import json
import os
import sys
import time

at = time.time()
time.sleep(0.1)  # in which a daemon that is alive would beat twenty times
with open(os.path.join(sys.argv[1], "beats")) as file:
    beats = [float(line) for line in file]
print(json.dumps({"at": at, "beats": len(beats), "late": [beat for beat in beats if beat >= at]}))
