"""Privacy events: one file per mechanism, with its parameters, privacy losses and Renyi divergences."""
