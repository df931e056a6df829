"""Values and decisions: functions of their arguments, without I/O, clocks or dice."""
