"""`python -m kvtier`, for where the command `kvtier` is not on the path."""

from kvtier.cli.main import main

if __name__ == "__main__":
    main()
