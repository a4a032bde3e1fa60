"""Command line, Python API, and ways to start the processes of a run."""
