"""Benchmarks of `dpcfl bench`: one file per row, and what other software does in the same setting."""
