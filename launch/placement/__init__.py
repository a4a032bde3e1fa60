"""Where workers live and how they are started: this machine, ssh, SLURM, Ray."""
