"""Cells of a sweep or a tuning: one run each, in this process, in several processes, in a SLURM job array or as Ray tasks."""
