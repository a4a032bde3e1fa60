"""Sizes that several rows measure: parameters of models, clients, and a unit of memory."""

CNN, WIDE, RESNET18 = 28_938, 4_009_990, 11_181_642  # parameters
CLIENTS = 21  # of the papers' runs
MIB = 2**20
