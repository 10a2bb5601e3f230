"""Kernels run in Triton's interpreter where there is no GPU; the switch counts at the import of triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
