"""Placement of workers: this machine, ssh, SLURM, Ray."""
