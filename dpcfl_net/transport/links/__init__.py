"""Emulated links of clients: rate, delay, loss, resets and off times, as a formula, as a relay process and as Linux netem."""
