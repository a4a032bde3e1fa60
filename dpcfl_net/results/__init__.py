"""Run folders as data: summaries, verification, comparison."""
