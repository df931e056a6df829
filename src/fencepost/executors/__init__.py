"""Where a job's body can run besides this interpreter: a command, an HTTP endpoint, a queue."""
