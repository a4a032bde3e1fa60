"""Placement of workers: this machine, ssh, SLURM or Ray."""
