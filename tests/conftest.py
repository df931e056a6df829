"""What holds for every test."""

from __future__ import annotations

import signal

# Who is started in the background ignores these, and so do its children; our tests send them.
for _number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(
            _number,
            signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL,
        )
