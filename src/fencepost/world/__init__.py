"""The doors to the machine. Nothing outside of this folder asks for time, threads, files or dice."""
