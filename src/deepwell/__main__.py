"""`python -m deepwell`: the command line."""

from deepwell.cli import main

main()
