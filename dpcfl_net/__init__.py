"""dpcfl_net: differentially private clustered federated learning as real processes and real messages."""

__version__ = "0.1.0"
