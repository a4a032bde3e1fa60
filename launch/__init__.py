"""Ways to start the processes of a run, and the command line."""
