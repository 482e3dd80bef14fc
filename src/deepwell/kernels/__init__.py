"""One file per op: the reference in plain torch, the configs, the kernel and its wrapper, in that order."""
