"""`python -m faststep`: the command line."""

from faststep.cli import main

main()
