"""Values and decisions: no I/O, no clock, no dice. Everything here is a function of its arguments."""
