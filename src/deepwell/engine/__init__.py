"""From a captured model to a training step: graph passes, bound kernels, and the engine that runs them."""
