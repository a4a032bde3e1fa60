"""Programs that run other software; each is started as `python -m`, and prints its samples as one line of JSON."""
