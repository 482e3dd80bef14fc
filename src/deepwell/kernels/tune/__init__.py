"""How a kernel is chosen: verified, tried in a sandbox, timed, cached."""
