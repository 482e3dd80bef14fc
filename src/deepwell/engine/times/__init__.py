"""How long the kernels of compiled graphs take on this machine."""
