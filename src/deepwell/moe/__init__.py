"""Mixtures of experts: router, losses, limits on experts, dispatch over ranks and the block of all of them."""
