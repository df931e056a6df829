"""Where runs are recorded: the port, the reference in memory, and SQL."""
