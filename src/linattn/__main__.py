"""`python -m linattn`: the command line."""

from linattn.cli import main

main()
