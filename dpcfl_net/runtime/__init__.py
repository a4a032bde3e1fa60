"""The processes of a run: coordinator, workers, observer."""
