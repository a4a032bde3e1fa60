"""Calls of client steps, in one process or over the network, behind the privacy gate."""
