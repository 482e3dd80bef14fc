"""How a step runs on a layout: one process, data, tensor, pipeline, context and expert parallelism."""
