"""Scripted malicious peers and a fuzzer for testing dpcfl_net."""
