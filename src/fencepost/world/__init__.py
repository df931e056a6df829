"""The doors to the machine: no flow or store asks for time, threads or dice elsewhere."""
