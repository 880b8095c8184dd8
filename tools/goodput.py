"""`megastable goodput`."""

from megastable.cli import main

if __name__ == "__main__":
    main("goodput")
