"""Imported once in the process that workers are forked from: what all of them need is loaded there and shared.

No socket, no thread pool, no random number and no CUDA may be used here: children inherit all of it.
"""

from __future__ import annotations

import gc
import importlib

import setproctitle
import torch

from dpcfl_net.algorithms.base import registry

setproctitle.setproctitle("dpcfl parent of all workers")
torch.set_num_threads(1)
for module in ("launch.local", "dpcfl_net.models", "dpcfl_net.privacy.fast_path", "zmq.auth.thread", "safetensors.numpy"):
    importlib.import_module(module)
registry()
gc.collect()
gc.freeze()
