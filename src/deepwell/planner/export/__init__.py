"""Plans in other engines' words. Pure."""
