"""One file per rewrite of the captured graph. Each pass is a function `(graph, context) -> number of places it changed`."""
