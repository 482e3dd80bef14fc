"""One file per rewrite of the captured graph. A pass changes the graph and returns how many places it changed."""
