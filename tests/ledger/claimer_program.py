"""Claims the slots it is told of, and says which of them are its own: claimer_program.py FILE N."""

from __future__ import annotations

import sys

from ledgerlab import DONE, attempt_of, opened, wanted

from fencepost.model.claim import Verdict
from fencepost.model.slot import RunKey
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

path, slots = sys.argv[1], int(sys.argv[2])
ledger = opened(path)
print("ready", flush=True)
sys.stdin.readline()
for slot in range(slots):
    # Each slot has a lock of its own, so that nothing but the slot decides.
    want = wanted(RunKey("job", slot), BlockingWorld().nonce(), lock=f"lock {slot}")
    answer = finish(ledger.claim(want))
    if answer.verdict is Verdict.GO:
        print(slot, flush=True)
        finish(ledger.finish(attempt_of(answer), DONE))
finish(ledger.close())
