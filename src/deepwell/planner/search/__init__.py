"""autoplan: the search for the best layout. Pure."""
