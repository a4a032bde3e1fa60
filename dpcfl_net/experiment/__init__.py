"""From a configuration to a signed job, its statement and its cost."""
