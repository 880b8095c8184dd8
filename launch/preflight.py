"""`megastable preflight`."""

from megastable.cli import main

if __name__ == "__main__":
    main("preflight")
