"""Production flows under virtual time: one seed, one history, and every fault is a knob."""
