"""`megastable report`."""

from megastable.cli import main

if __name__ == "__main__":
    main("report")
